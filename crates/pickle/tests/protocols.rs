//! Pickles by Python, in every protocol; and what is cut, changed or made up.

use phalanx_pickle::{Error, Value, read};
use proptest::prelude::*;
use std::path::Path;

/// What Python calls to make the values of the golden files: bytes and sets have no opcode in the early protocols.
const GLOBALS: &[&str] = &[
    "collections.OrderedDict",
    "_codecs.encode",
    "__builtin__.set",
    "__builtin__.bytes",
    "builtins.bytearray",
    "builtins.set",
];

fn golden(protocol: u32) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    std::fs::read(folder.join(format!("{protocol}.pickle"))).unwrap()
}

fn ints(numbers: &[i128]) -> Vec<Value<'static>> {
    numbers.iter().map(|&n| Value::Int(n)).collect()
}

fn text(text: &str) -> Value<'_> {
    Value::Str(text.into())
}

#[test]
fn every_protocol_gives_the_same_values() {
    for protocol in 0..=5 {
        let bytes = golden(protocol);
        let mut rest = bytes.as_slice();
        let values = read(&mut rest, GLOBALS).unwrap();
        assert!(rest.is_empty(), "protocol {protocol}");
        let check = |key: &str, want: Value| {
            assert_eq!(values.get(key), Some(&want), "protocol {protocol}: {key}");
        };
        check("none", Value::None);
        check("bools", Value::Tuple(vec![Value::Bool(true), Value::Bool(false)]));
        let numbers = [0, 255, 256, -1, 65536, 1 << 31, -(1 << 40), 119_547_037_146_038_801_333_356];
        check("ints", Value::List(ints(&numbers)));
        check("float", Value::Float(0.1));
        check("text", text("caf\u{e9} \\ \n \u{1f600}"));
        let tuples = [&[][..], &[1], &[1, 2], &[1, 2, 3], &[1, 2, 3, 4]];
        check("tuples", Value::Tuple(tuples.iter().map(|t| Value::Tuple(ints(t))).collect()));
        check("shared", Value::List(vec![Value::List(ints(&[1, 2])); 2]));
        check("long", text(&"x".repeat(300)));

        // Bytes are a call that encodes text before protocol 3, sets one that takes a list before protocol 4.
        match values.get("bytes").unwrap() {
            Value::Bytes(bytes) => assert_eq!(**bytes, *b"\x00\xff\n"),
            Value::Object(call) => {
                assert_eq!(call.name, "_codecs.encode");
                assert_eq!(call.args, [text("\0\u{ff}\n"), text("latin1")]);
            }
            other => panic!("protocol {protocol}: {other:?}"),
        }
        match values.get("set").unwrap() {
            Value::Set(elements) => assert_eq!(*elements, ints(&[7])),
            Value::Object(call) => assert_eq!(call.args, [Value::List(ints(&[7]))]),
            other => panic!("protocol {protocol}: {other:?}"),
        }
        let Value::Object(ordered) = values.get("ordered").unwrap() else { panic!("protocol {protocol}") };
        assert_eq!(ordered.name, "collections.OrderedDict");
        assert_eq!(ordered.items, [(text("a"), Value::Int(1)), (text("b"), Value::List(vec![]))]);
        assert_eq!((&ordered.args, &ordered.state), (&vec![], &None));
    }
}

#[test]
fn what_is_not_listed_is_refused_by_its_name() {
    for protocol in 0..=5 {
        let bytes = golden(protocol);
        let error = read(&mut bytes.as_slice(), &GLOBALS[1..]).unwrap_err();
        assert_eq!(error, Error::Refused { name: "collections.OrderedDict".into() }, "protocol {protocol}");
    }
}

#[test]
fn a_cut_pickle_is_an_error_at_every_length() {
    for protocol in 0..=5 {
        let bytes = golden(protocol);
        for len in 0..bytes.len() {
            assert!(read(&mut &bytes[..len], GLOBALS).is_err(), "protocol {protocol}, {len} bytes");
        }
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&mut bytes.as_slice(), GLOBALS);
    }

    /// Opcodes without an argument, and the memo with small numbers, get further than any bytes do.
    #[test]
    fn no_opcodes_make_it_panic(
        opcodes in proptest::collection::vec(
            prop_oneof![
                proptest::sample::select(b"N()]}tldausebR012oQ\x81\x85\x86\x87\x88\x8f\x90\x91\x92\x93\x94".as_slice())
                    .prop_map(|opcode| vec![opcode]),
                (proptest::sample::select(b"hqK".as_slice()), 0..4_u8).prop_map(|(opcode, n)| vec![opcode, n]),
                Just(b"c__builtin__\nset\n".to_vec()),
                Just(b"U\x01x".to_vec()),
            ],
            0..80,
        )
    ) {
        let bytes = [opcodes.concat(), b".".to_vec()].concat();
        let _ = read(&mut bytes.as_slice(), GLOBALS);
    }

    #[test]
    fn no_change_of_a_byte_makes_it_panic(
        protocol in 0..=5_u32,
        places in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = golden(protocol);
        for (place, byte) in places {
            let i = place.index(bytes.len());
            bytes[i] = byte;
        }
        let _ = read(&mut bytes.as_slice(), GLOBALS);
    }
}
