"""
Interrupt the lock wherever the interpreter could, and check that it still works: ``python -m tests.lab.interrupts``.

A signal handler that raises, a soft time limit or ``PyThreadState_SetAsyncExc`` ends Python code between two bytecodes.
The interpreter checks for such events at the start of a function, after a call, and when a loop begins again. The sweep
raises an exception at the first of these points, then at the second, and so on, until the code finishes without
reaching the point. With ``--lines`` it also raises before every line, except where no signal handler can run: before
``__exit__`` is called at the end of a ``with`` block. With ``--each-line`` it raises at the first point of each line
and at one random later point of it, and does the same in the library code that these lines call. With ``--twice`` it
raises once more while the first exception is handled.

After every interruption, three things must hold. The lock is free for others or ends with its lease. The interrupted
thread can enter it again. A lease that another thread takes is renewed and released. What runs in the background must
go on: releases that a node missed are redelivered, and no waiter is left over.

======================= =====================================================================================
module                  contents
======================= =====================================================================================
``trap``                raises at one point, and counts the points
``scenarios``           the code to interrupt: blocking
``background``          the code to interrupt: what threads in the background do
``async_scenarios``     the code to interrupt: asyncio
``sweep``               interrupts one scenario everywhere, and checks what must hold
``reach``               which lines of the engine no scenario reaches, and why (``--uncovered``)
``storm``               signals at random moments
======================= =====================================================================================
"""
