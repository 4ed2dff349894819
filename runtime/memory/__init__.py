"""The texts of earlier requests, which later ones of the same owner are drafted from."""
