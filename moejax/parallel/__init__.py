"""How layers are spread over pipeline stages, and what is recomputed."""
