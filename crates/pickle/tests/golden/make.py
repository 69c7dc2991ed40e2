"""The same values as Python 3 pickles them, in every protocol: N.pickle. `crates/pickle/tests/protocols.rs` says what they are.
Usage: python make.py OUT_DIR"""
import collections, pickle, sys

shared = [1, 2]
values = {
    "none": None,
    "bools": (True, False),
    "ints": [0, 255, 256, -1, 65536, 1 << 31, -(1 << 40), 119547037146038801333356],
    "float": 0.1,
    "bytes": b"\x00\xff\n",
    "text": "caf\u00e9 \\ \n \U0001f600",
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "shared": [shared, shared],
    "set": {7},
    "ordered": collections.OrderedDict([("a", 1), ("b", [])]),
    "long": "x" * 300,
}
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    with open(f"{sys.argv[1]}/{protocol}.pickle", "wb") as file:
        pickle.dump(values, file, protocol)
