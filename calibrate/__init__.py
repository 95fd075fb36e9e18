"""What real models and real hardware do: interpreters on a model, timing, decision logs, fits."""
