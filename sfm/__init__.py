"""Training of seismic foundation models: 3D masked autoencoders over MDIO surveys."""

__version__ = "0.1.0"
