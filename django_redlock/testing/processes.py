"""
Start programs that do not outlive the process that started them.

An exit hook is not enough: it does not run when the process gets SIGTERM or SIGKILL. Linux can do it; on other systems
such programs stay behind.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

# This Python code turns into the program. It asks Linux for a SIGKILL when the parent dies (PR_SET_PDEATHSIG is 1,
# SIGKILL is 9), and gives up if the parent has already died. The usual preexec_fn would run Python in a child forked
# from a process that may have threads, which Python 3.12 warns about. The user is set first, because Linux drops the
# request when a process changes its rights.
TIED_TO_PARENT = """\
import ctypes, os, sys
if user := sys.argv[2]:
    import pwd, warnings  # execvp() needs the latter, and another user may not be able to read it
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit("the parent is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""


def spawn(command: Sequence[str], *, user: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """
    Start *command* in a session of its own, so that Ctrl-C is left to this process.

    On Linux, the program gets SIGKILL when this process ends, however it ends. Children of the program do not, unless
    they are started the same way.

    Args:
        command: The program, as a path or a name on ``PATH``, and its arguments.
        user: Name of the user to run it as; "" means the user of this process. Only root may name another.
        options: Arguments for :class:`subprocess.Popen`; bytes, not text.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", TIED_TO_PARENT, str(os.getpid()), user, *command]
    elif user:
        options["user"] = user
    # Linux ties a process to the thread that starts it. The main thread lives as long as the process; for any other
    # thread, one that never ends does the work.
    if threading.current_thread() is threading.main_thread():
        return _popen(command, options)
    return _keeper(os.getpid()).submit(_popen, command, options).result()


@cache
def _keeper(pid: int) -> ThreadPoolExecutor:
    """Return the thread of process *pid* that ends with it; a forked process needs its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="redlock-keeper")


def _popen(command: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True, **options)
