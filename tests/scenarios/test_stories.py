"""The transcripts are what the machines do. After a change on purpose: `python tests/scenarios/stories.py`, and read the diff."""

import pytest
from stories import HERE, STORIES, Story


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_the_story_goes_as_written(story: Story) -> None:
    assert story.text() == story.path.read_text()


def test_every_transcript_has_its_story() -> None:
    assert sorted(path.name for path in HERE.glob("*.txt")) == sorted(story.path.name for story in STORIES)
