"""What went wrong inside a user's program, in words and with the line that it stands in."""

import inspect
import linecache
from collections.abc import Callable

__all__ = ["failure", "run_time_value", "where"]


def failure(error: BaseException, program: Callable, num_rows: int) -> str:
    """Say how a program failed, and what helps where the cause is known."""
    words = f"the program failed on {num_rows} rows{where(error, program)}: {type(error).__name__}: {error}"
    if "must have integer" in str(error):
        words += (
            "; a number of trials or an index that comes as a float, from a context for instance, needs .astype(int)"
        )
    return words


def run_time_value(error: BaseException, program: Callable) -> str:
    """Say that a program wants a number before there is one."""
    return (
        f"the program needs a value that is only known at run time{where(error, program)}: it must not branch in Python on "
        "arm, context or a site's value, nor turn them into Python or NumPy numbers; index an array by arm or use jnp.where"
    )


def where(error: BaseException, program: Callable) -> str:
    """Return the last line of the program's own file that an error passed through, in brackets; empty if there is none."""
    code = getattr(inspect.unwrap(program), "__code__", None)
    line, step = None, error.__traceback__
    while step is not None:
        if code is not None and step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    if line is None or code is None:
        return ""
    return f" (line {line}: `{linecache.getline(code.co_filename, line).strip()}`)"
