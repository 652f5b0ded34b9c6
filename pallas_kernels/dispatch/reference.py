"""The definition of an exchange, seen from outside: all devices' arrays in one, device first."""

import jax.numpy as jnp


def exchange_rows(x_PTD, tokens_PS, tables_P, num_rows: int):
    """Returns [P, num_rows, D]: what each device has received; rows that nobody sends are zeros.

    Device p sends x_PTD[p, tokens_PS[p, i]] (zeros for a token of -1; x_PTD[p, i] where `tokens_PS`
    is None) for the places i that its tables name: `tables_P` is `Tables` of [P, P] arrays.
    """
    P, _, D = x_PTD.shape
    out_PRD = jnp.zeros((P, num_rows, D), x_PTD.dtype)
    for p in range(P):
        for q in range(P):
            first, size, to = (int(t[p, q]) for t in tables_P[:3])
            for i in range(size):
                token = first + i if tokens_PS is None else int(tokens_PS[p, first + i])
                if token >= 0:
                    out_PRD = out_PRD.at[q, to + i].set(x_PTD[p, token])
    return out_PRD
