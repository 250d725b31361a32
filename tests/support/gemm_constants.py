"""Constants of the performance model as tests know them, whatever was fitted since."""

#: What model.json says of one GPU; plausible for an H200.
GPU = {
    "machine": {
        "multiprocessors": 132,
        "bandwidth": 4.4e12,
        "l2_bandwidth": 9.0e12,
        "l2_bytes": 3.0e7,
        "pieces": 2.5e12,
        "sustained": {"float16": 8.2e14, "float8": 1.55e15, "int8": 1.6e15, "float32": 4.2e14},
    },
    "families": {
        "sm90.gemm": {
            "overhead": 2.0e-6,
            "latency": 1.0e-6,
            "rate": {"float16": 7.6e12, "float8": 1.52e13, "int8": 1.52e13, "float32": 3.8e12},
            "share": {"cooperative": 1.0, "pingpong": 1.0},
            "feed": 2.4e11,
            "arrival": 1.0,
            "load": 1.1e11,
            "step": 2.0e-8,
            "store": 6.0e10,
            "epilogue": 6.0e-7,
            "late": 4.0,
            "handover": 1.5e-6,
            "seam": 3.0e-6,
            "sharpness": 8,
            "meeting": 8e-7,
        },
        "sm80.gemm": {
            "overhead": 2.0e-6,
            "latency": 1.0e-6,
            "rate": {"float16": 4.6e12, "float8": 9.2e12, "int8": 9.2e12, "float32": 2.3e12},
            "share": {"multistage": 1.0},
            "feed": 2.0e11,
            "arrival": 1.0,
            "load": 9.0e10,
            "step": 4.0e-8,
            "store": 4.0e10,
            "epilogue": 5.0e-7,
            "late": 4.0,
            "handover": 1.5e-6,
            "seam": 3.0e-6,
            "sharpness": 8,
            "meeting": 8e-7,
        },
    },
}
