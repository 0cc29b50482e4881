"""Every key of a recipe: one file a table or two, as typed models that say what each key means."""
