"""What `everlong bench` measures, one file each: `measure() -> list[Row]`."""
