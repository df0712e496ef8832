"""The sources that the readers of `spotfit.data` create."""
