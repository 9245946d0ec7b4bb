"""What all sections of a recipe share: their base class and the bounded numbers."""

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """Base of all parts of a recipe."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        # Prefect's form shows titles: the key as an override names it.
        field_title_generator=lambda key, _: key,
    )


def said(section: Section, exclude: Collection[str] = ()) -> dict[str, Any]:
    """The values of `section` that are not its defaults, as JSON has them, without the keys `exclude`.

    What a digest is made of: a key that comes later, with a default that changes nothing, leaves the
    digests of older runs as they were.
    """
    values = section.model_dump(mode="json", exclude=set(exclude))
    found = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        # Which of several classes an entry of a list is, its kind says, default or not.
        if key in values and (key == "kind" or value != field.get_default(call_default_factory=True)):
            found[key] = _said_in(value, values[key])
    return found


def _said_in(value: Any, dumped: Any) -> Any:
    if isinstance(value, Section):
        return said(value)
    if isinstance(value, tuple):
        return [_said_in(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped
