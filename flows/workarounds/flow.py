"""The flow's class: its form, its stored parameters, and the tag of its runs."""

from inspect import Signature, signature
from typing import Annotated, Any

from prefect import tags
from prefect.flows import Flow
from pydantic_core import to_jsonable_python

from infini_llama.configs.secrets import stored_settings
from infini_llama.flows.form import ChangesForm
from infini_llama.flows.settings import TAG


class PipelineFlow(Flow[..., Any]):
    """A flow of `config` and `changes` whose form is that of `changes`, whoever deploys it.

    Needed with Prefect 3.9.1. Upstream: no issue is known; Prefect's form is that of the function's
    signature. Test: `test_a_form_has_every_parameter_of_the_function`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the flow, also as a subflow; its run has the tag that automations match."""
        with tags(TAG):
            return super().__call__(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        """The schema that Prefect makes the form from.

        That of the function itself would have to be made in every run.
        """
        changes = signature(self.fn).parameters["changes"]
        return Signature(
            [changes.replace(annotation=Annotated[dict[str, Any], ChangesForm()])]
        )

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters as the server stores them: without values that may be secret.

        The call itself keeps them.

        Otherwise the same as Prefect's, without FastAPI, whose import takes a tenth of a second.
        Needed with Prefect 3.9.1. Upstream: PrefectHQ/prefect#16473, merged, has it imported here
        and no longer at the start. Test: `test_fastapi_is_imported_to_store_parameters`.
        """
        stored: dict[str, Any] = to_jsonable_python(parameters)
        for name in ("config", "changes"):
            if name in stored:
                stored[name] = stored_settings(stored[name])
        return stored
