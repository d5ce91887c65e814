"""The production control plane in a virtual world: clock, network, disk, engines and trainer, all from one seed."""
