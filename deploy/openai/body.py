"""From the bytes of a request body to Python values."""

import json
from typing import Any, NoReturn

from engine.errors import InvalidRequestError

from .fields import shown


def decode_json(raw: bytes, what: str = "body") -> Any:
    """Decode JSON. ``what`` it is, errors say.

    Raises InvalidRequestError where it is not JSON as RFC 8259 has it: Python's own reader would let ``NaN`` and
    half a surrogate pair through, and both fail much later, where the client cannot be told.
    """
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=lambda name: _refuse_constant(what, name))
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise InvalidRequestError(f"the {what} is not valid JSON: {error.msg} at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the {what} is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise InvalidRequestError(f"the {what} has half a surrogate pair, {half}; send whole characters") from None
    except (RecursionError, ValueError) as error:
        # ValueError: a number of more digits than Python converts.
        raise InvalidRequestError(f"the {what} cannot be read as JSON: {shown(str(error))}") from None
    return value


def _refuse_constant(what: str, name: str) -> NoReturn:
    raise InvalidRequestError(f"the {what} has {name}, which is not JSON; send a finite number or null")
