"""What must be in the environment before a worker's Python starts. No torch."""


def required_environment(numerics: str) -> dict[str, str]:
    """Intel's MKL takes its summation order from the shape unless told before it is loaded.

    Where it changes nothing it does no harm: whether the mode holds is for `numerics.self_test` to say.
    """
    return {"MKL_CBWR": "AVX512,STRICT"} if numerics == "aligned" else {}
