"""Messages about exceptions inside a user's program, with the line of the program that raised them."""

import inspect
import linecache
from collections.abc import Callable

__all__ = ["failing_line", "failure_message", "traced_value_message"]


def failure_message(error: BaseException, program: Callable, num_rows: int) -> str:
    """Return a message that a program failed, with advice if the cause is known."""
    message = f"the program failed on {num_rows} rows{failing_line(error, program)}: {type(error).__name__}: {error}"
    if "must have integer" in str(error):
        message += (
            "; a number of trials or an index that is a float, for example one from a context, needs .astype(int)"
        )
    return message


def traced_value_message(error: BaseException, program: Callable) -> str:
    """Return a message that a program uses the number of a traced value."""
    return (
        f"the program needs a value that is only known at run time{failing_line(error, program)}: it must not branch in Python "
        "on arm, context or a site's value, nor turn them into Python or NumPy numbers; index an array by arm or use jnp.where"
    )


def failing_line(error: BaseException, program: Callable) -> str:
    """Return the innermost line of the program's own file in a traceback, in brackets; "" if there is none."""
    code = getattr(inspect.unwrap(program), "__code__", None)
    line, step = None, error.__traceback__
    while step is not None:
        if code is not None and step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    if line is None or code is None:
        return ""
    return f" (line {line}: `{linecache.getline(code.co_filename, line).strip()}`)"
