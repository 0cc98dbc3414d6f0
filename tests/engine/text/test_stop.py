import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop import StopMatcher

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.text("abc\n", max_size=6), max_size=12)


def reference(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Walk the whole text character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        matches = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(PIECES, STOPS, st.booleans())
def test_any_cut_releases_what_a_search_of_the_whole_text_finds(pieces, stop, include):
    matcher = StopMatcher(stop, include)
    released = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (released, matcher.matched) == reference("".join(pieces), stop, include)


@given(PIECES, STOPS)
def test_what_is_held_is_no_more_than_the_beginning_of_a_stop_string(pieces, stop):
    matcher, text, released = StopMatcher(stop), "", ""
    for piece in pieces:
        text += piece
        released += matcher.push(piece)
        if matcher.matched is None:
            held = text[len(released) :]
            longer = [text[start:] for start in range(len(released))]
            assert not held or any(candidate.startswith(held) for candidate in stop)
            assert not any(candidate.startswith(suffix) for suffix in longer for candidate in stop)


def test_without_stop_strings_text_passes():
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


@pytest.mark.parametrize(("include", "released"), [(False, "one "), (True, "one STOP")])
def test_text_after_a_match_is_dropped(include, released):
    matcher = StopMatcher(("STOP",), include)
    assert matcher.push("one STOP two") == released
    assert matcher.matched == "STOP"
    assert matcher.push("three") == ""
    assert matcher.flush() == ""


def test_a_beginning_that_does_not_go_on_is_released():
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("hello\n\nU") == "hello"
    assert matcher.push("p") == "\n\nUp"
    assert matcher.push("\n") == ""
    assert matcher.flush() == "\n"
    assert matcher.matched is None
