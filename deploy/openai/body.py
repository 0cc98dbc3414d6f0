"""From the bytes of a request body to Python values."""

import json
from typing import Any, NoReturn

from engine.errors import InvalidRequestError

from .fields import shown


def decode_json(raw: bytes) -> Any:
    """Decode a JSON body.

    Raises InvalidRequestError where the body is not JSON as RFC 8259 has it: Python's own reader would let ``NaN`` and
    half a surrogate pair through, and both fail much later, where the client cannot be told.
    """
    try:
        text = raw.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise InvalidRequestError(f"the body has half a surrogate pair, {half}; send whole characters") from None
    except (RecursionError, ValueError) as error:
        # ValueError: a number of more digits than Python converts.
        raise InvalidRequestError(f"the body cannot be read as JSON: {shown(str(error))}") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body has {name}, which is not JSON; send a finite number or null")
