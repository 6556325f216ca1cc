"""Tables, figures and reports of a comparison."""
