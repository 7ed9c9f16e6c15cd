"""Side effects: state that an operator reaches, changes, shares or keeps alive."""
