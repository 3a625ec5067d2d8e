"""What is checked about surveys before a job starts anything."""

from __future__ import annotations

from sfm.spec import JobSpec, SurveySource
from sfm.survey.mdio import Survey, open_survey
from sfm.survey.sampler import Area, Sampler
from sfm.survey.split import Index


def check(spec: JobSpec) -> None:
    """Open every survey of `spec` and see that its window fits, for training and for evaluation.

    Raises:
        SfmError: a survey cannot be opened or does not suit the window, in a sentence that names it.
    """
    sampler_of(spec, open_all(spec))


def open_all(spec: JobSpec, window: Index | None = None) -> list[Survey]:
    """The surveys of `spec`, in its order.

    Args:
        window: voxels of what will be read at a time, to choose among copies of a survey in other chunks. Windows that
            keep to the chunks of the amplitudes are read from these.

    Raises:
        SurveyError: one of them cannot be opened.
    """
    window = None if spec.window.align else window
    return [open_survey(source.url, source.storage, window) for source in spec.surveys]


def sampler_of(spec: JobSpec, surveys: list[Survey]) -> Sampler:
    """The sampler of a job over its opened surveys.

    Raises:
        SurveyError: a survey is too small for the window, or no window holds enough live traces.
    """
    areas = [_area(source, survey) for source, survey in zip(spec.surveys, surveys, strict=True)]
    return Sampler(areas, spec.window, spec.seed)


def _area(source: SurveySource, survey: Survey) -> Area:
    i, x, t = survey.amplitudes.chunks  # not of a copy, which another rank may not read
    return Area(survey.shape, source.weight, survey.url, survey.trace_mask, source.held_out, (i, x, t))
