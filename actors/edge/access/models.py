"""The models that a principal may use: the only way from a request's `model` to a `Model`."""

from headwater.actors.edge.access.principal import Principal
from headwater.actors.edge.access.refusals import forbidden
from headwater.actors.edge.model.catalog import Model, ModelCatalog
from headwater.actors.http.errors import ApiError, no_model


def permitted_models(models: ModelCatalog, principal: Principal) -> list[Model]:
    """All served models that the principal may use."""
    return [model for model in models.all() if _permits(principal, model)]


def permitted_model(models: ModelCatalog, principal: Principal, name: str) -> Model:
    """The model with this name or alias.

    Raises `ApiError` 403 naming the scope, equally whether another tenant's model exists or not, and 404 for a model
    that would be permitted but is not served.
    """
    try:
        model = models.get(name)
    except ApiError as error:
        if not principal.authenticated:
            raise
        if principal.permits_model(name):
            known = [model.card.name for model in permitted_models(models, principal)]
            raise no_model(name, known) from error
    else:
        if _permits(principal, model):
            return model
    raise forbidden(
        f"The model {name[:256]!r} requires the scope 'models:{name[:256]}', which this key lacks.",
        param="model",
    )


def _permits(principal: Principal, model: Model) -> bool:
    return principal.permits_model(model.card.name, *model.card.aliases)
