"""
The keys of tasks, views and commands: what distinguishes one piece of work from others of its kind (internal).

A key is made from the values of a call: those of a task's parameters (:mod:`.task`), of a request, or of a command's
options (:mod:`.view`). Different values never give the same key: in values, the characters of the text around them are
escaped, and a long value is cut and gets a digest.
"""
