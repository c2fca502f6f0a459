"""From what the user calls a model to a frozen model whose attention is ours."""
