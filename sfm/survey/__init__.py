"""Seismic surveys: open MDIO on any store, describe, sample and read it; make it from SEG-Y. No torch, no Ray."""
