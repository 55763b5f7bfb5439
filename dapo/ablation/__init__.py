"""`python -m dapo.ablation`: the paper's techniques one by one, several seeds each."""
