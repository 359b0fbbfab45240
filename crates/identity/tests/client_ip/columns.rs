//! Tests client addresses with a table. Each row is a request, and each column is a configuration.

use tidegate_identity::Trust;

use crate::{FORWARDED, Lines, XFF, client, hops, ours};

const PEER: &str = "10.0.0.8";
const STRANGER: &str = "192.0.2.1";
const CF: &str = "cf-connecting-ip";

fn columns() -> [Trust; 7] {
    [
        Trust::default(),
        hops(1, XFF),
        hops(2, XFF),
        ours(XFF),
        hops(1, FORWARDED),
        ours(FORWARDED),
        ours(CF),
    ]
}

const PLAIN: Lines<'_> = &[
    (XFF, "6.6.6.6, 203.0.113.9, 198.51.100.7"),
    (
        FORWARDED,
        "for=6.6.6.6, for=203.0.113.10, for=\"[fd00::7]:_p\"",
    ),
    (CF, "203.0.113.11"),
];

const DRESSED: Lines<'_> = &[
    (XFF, "203.0.113.9:51000, [::ffff:198.51.100.7]:443"),
    (
        FORWARDED,
        "FOR=\"203.0.113.10:1\";proto=https , for=\"[fd00::7%25eth0]\"",
    ),
    (CF, "::ffff:203.0.113.11"),
];

const NONSENSE: Lines<'_> = &[
    (XFF, "203.0.113.9, ,\u{e9}, _hidden"),
    (FORWARDED, "for=203.0.113.10, for=\"6.6.6.6"),
    (CF, "203.0.113.11, 6.6.6.6"),
];

const SEVERAL: Lines<'_> = &[
    (XFF, "6.6.6.6"),
    (XFF, "203.0.113.9"),
    (XFF, "fe80::7%eth0"),
    (FORWARDED, "for=6.6.6.6"),
    (FORWARDED, "for=203.0.113.10"),
    (CF, "6.6.6.6"),
    (CF, "203.0.113.11"),
];

#[test]
fn every_configuration_has_its_own_client() {
    let named = [
        PEER,
        "198.51.100.7",
        "203.0.113.9",
        "203.0.113.9",
        "fd00::7",
        "203.0.113.10",
        "203.0.113.11",
    ];
    let last_lines = [
        PEER,
        "fe80::7",
        "203.0.113.9",
        "fe80::7",
        "203.0.113.10",
        "203.0.113.10",
        PEER,
    ];
    let table: [(Lines<'_>, [&str; 7]); 5] = [
        (&[], [PEER; 7]),
        (PLAIN, named),
        (DRESSED, named),
        (NONSENSE, [PEER; 7]),
        (SEVERAL, last_lines),
    ];
    for (lines, clients) in table {
        for (trust, expected) in columns().iter().zip(clients) {
            let found = client(trust, PEER, lines);
            assert_eq!(found, expected, "{lines:?} under {trust:?}");
            // With a configured number of hops, every peer is trusted. With a list of networks,
            // headers from an untrusted peer are ignored.
            if !trust.is_trusted(STRANGER.parse().unwrap()) {
                assert_eq!(client(trust, STRANGER, lines), STRANGER);
            }
        }
    }
}
