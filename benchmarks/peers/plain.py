"""PyTorch's side of the mode eager: one process, no parallel function."""


def parallelise(model):
    return model


def make_optimizer(model, adamw, **options):
    return adamw(model.parameters(), lr=1e-3, fused=True, **options)
