"""The grid of devices and its roles, sharding tables, parameters, precision, collectives."""
