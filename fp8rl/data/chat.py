"""Questions as prompt tokens: as they are, or as a user's turn in the tokenizer's chat template."""

import json
from pathlib import Path
from typing import Any

from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task

_NO_TEMPLATE = (
    "task.chat: the tokenizer in {} has no chat template. Set task.chat=false, or name an "
    "instruction-tuned model"
)


def require_chat_template(task: Task, folder: Path) -> None:
    """Raises RecipeError where `task` asks for chat and the model's folder has no chat template.

    Looks at the files only, so that it answers without transformers.
    """
    if not task.chat:
        return
    config = folder / "tokenizer_config.json"
    inside = config.is_file() and json.loads(config.read_text()).get("chat_template")
    beside = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    if not inside and not beside:
        raise RecipeError(_NO_TEMPLATE.format(folder))


def question_tokens(tokenizer: Any, task: Task, question: str, system: str | None = None) -> list[int]:
    """The prompt that asks `question`. system: its own system turn, instead of task.system.

    Raises RecipeError where `task` asks for chat and the tokenizer has no chat template, or its
    template refuses the turns.
    """
    if system is not None and not task.chat:
        raise RecipeError(
            "task.chat: the data have system turns, which need a chat. Set task.chat=true"
        )
    if not task.chat:
        tokens: list[int] = tokenizer(question).input_ids
        return tokens
    if tokenizer.chat_template is None:
        raise RecipeError(_NO_TEMPLATE.format(tokenizer.name_or_path))
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": question}]
    system = task.system if system is None else system
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    try:
        tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise RecipeError(f"task.chat, task.system: the chat template refuses them: {error}") from None
    return tokens
