"""Tables, figures, texts, HTML and ArviZ objects of a bandit."""
