"""Random packed trees for hypothesis: segments (parent or -1, start, length) that tile the tokens, parents first."""

from hypothesis import strategies as st


@st.composite
def forests(draw, max_segments=9, max_length=7):
    """Empty segments among them; at least one token."""
    segments, start = [], 0
    for index in range(draw(st.integers(1, max_segments))):
        parent = draw(st.integers(-1, index - 1)) if index else -1
        length = draw(st.integers(0 if index else 1, max_length))
        segments.append((parent, start, length))
        start += length
    return segments


def path_of(segments, index):
    """Tokens from the root to the segment's end."""
    parent, start, length = segments[index]
    above = path_of(segments, parent) if parent >= 0 else []
    return above + list(range(start, start + length))
