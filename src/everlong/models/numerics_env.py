"""What must be in the environment before a worker's Python starts. No torch."""


def required_environment(numerics: str) -> dict[str, str]:
    """Intel's MKL takes its summation order from the shape unless told before it is loaded; others ignore the variable."""
    return {"MKL_CBWR": "AVX512,STRICT"} if numerics == "aligned" else {}
