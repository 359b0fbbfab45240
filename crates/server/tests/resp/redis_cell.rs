//! Compares `CL.THROTTLE` with redis-cell's recorded and documented replies.

use tidegate_core::Span;

use crate::listener::TestListener;

/// The example in redis-cell's README.
#[test]
fn the_redis_cell_readme_example() {
    let listener = TestListener::open();
    let answer = listener.connect().command("CL.THROTTLE user123 15 30 60");
    assert_eq!(answer.to_string(), "[0, 16, 15, -1, 2]");
}

/// Recorded replies with a burst of 4 and a rate of one per second. Each case consists of the time
/// in ms, the quantity, and the reply. The elements of the reply are limited, limit, remaining,
/// retry after and reset after.
const RECORDED: [(u64, u64, [i64; 5]); 16] = [
    (0, 6, [1, 5, 5, -1, 0]),
    (0, 1, [0, 5, 4, -1, 1]),
    (0, 1, [0, 5, 3, -1, 2]),
    (0, 1, [0, 5, 2, -1, 3]),
    (0, 1, [0, 5, 1, -1, 4]),
    (0, 1, [0, 5, 0, -1, 5]),
    (0, 1, [1, 5, 0, 1, 5]),
    (3_000, 1, [0, 5, 2, -1, 3]),
    (3_100, 1, [0, 5, 1, -1, 4]),
    (4_000, 1, [0, 5, 1, -1, 4]),
    (8_000, 1, [0, 5, 4, -1, 1]),
    (9_500, 1, [0, 5, 4, -1, 1]),
    (9_500, 0, [0, 5, 4, -1, 1]),
    (9_500, 2, [0, 5, 2, -1, 3]),
    (9_500, 5, [1, 5, 2, 3, 3]),
    (9_500, 0, [0, 5, 2, -1, 3]),
];

#[test]
fn recorded_replies_are_reproduced() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    for (step, (millis, quantity, expected)) in RECORDED.into_iter().enumerate() {
        listener.at_millis(millis);
        let answer = client.command(&format!("CL.THROTTLE key 4 1 1 {quantity}"));
        let expected = format!("[{}]", expected.map(|number| number.to_string()).join(", "));
        assert_eq!(
            answer.to_string(),
            expected,
            "step {step}: {quantity} at {millis} ms"
        );
    }
}

#[test]
fn waiting_for_retry_after_is_enough() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    // The limit refills one request every third of a second, but the shortest wait time that the
    // reply can express is one second.
    assert_eq!(
        client.command("CL.THROTTLE key 0 3 1").to_string(),
        "[0, 1, 0, -1, 1]"
    );
    assert_eq!(
        client.command("CL.THROTTLE key 0 3 1").to_string(),
        "[1, 1, 0, 1, 1]"
    );
    listener.at_millis(333);
    assert_eq!(
        client.command("CL.THROTTLE key 0 3 1").to_string(),
        "[1, 1, 0, 1, 1]"
    );
    listener.at_millis(334);
    assert_eq!(
        client.command("CL.THROTTLE key 0 3 1").to_string(),
        "[0, 1, 0, -1, 1]"
    );
}

#[test]
fn keys_are_any_bytes_and_names_any_case() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let keys: [&[u8]; 4] = [b"\xff\xfe\0", b"\r\n", b"\xf7", &[b'k'; 1_000]];
    for key in keys {
        for remaining in [1, 0] {
            let answer = client.command_of(&[b"cL.tHROTTLE", key, b"1", b"1", b"60"]);
            assert_eq!(
                answer.items()[2].to_string(),
                remaining.to_string(),
                "{}",
                key.escape_ascii()
            );
        }
    }
}

#[test]
fn clients_of_one_key_share_its_count_and_changed_numbers_keep_it() {
    let listener = TestListener::open();
    let (mut one, mut other) = (listener.connect(), listener.connect());
    assert_eq!(
        one.command("CL.THROTTLE key 4 1 60 3").to_string(),
        "[0, 5, 2, -1, 180]"
    );
    assert_eq!(
        other.command("CL.THROTTLE key 4 1 60 2").to_string(),
        "[0, 5, 0, -1, 300]"
    );
    assert_eq!(
        one.command("CL.THROTTLE key 9 1 60 0").items()[2].to_string(),
        "5",
        "raised at once"
    );
    assert_eq!(
        one.command("CL.THROTTLE another 4 1 60").items()[2].to_string(),
        "4"
    );
}

#[test]
fn errors_match_the_original() {
    let usage = "-Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
    let integer = |text| format!("-Cell error: Store error: Couldn't parse as integer: {text}");
    let zero = "-Cell error: Store error: Zero rates are not supported";
    let refused = [
        ("CL.THROTTLE", usage.to_owned()),
        ("CL.THROTTLE key 1 2", usage.to_owned()),
        ("CL.THROTTLE key 1 2 3 4 5", usage.to_owned()),
        ("CL.THROTTLE key x 1 60", integer("x")),
        ("CL.THROTTLE key 1 1.5 60", integer("1.5")),
        ("CL.THROTTLE key 1 1 60s", integer("60s")),
        (
            "CL.THROTTLE key 1 1 60 99999999999999999999",
            integer("99999999999999999999"),
        ),
        ("CL.THROTTLE key 1 0 60", zero.to_owned()),
        ("CL.THROTTLE key 1 1 0", zero.to_owned()),
    ];
    let listener = TestListener::open();
    let mut client = listener.connect();
    for (command, expected) in refused {
        assert_eq!(client.command(command).to_string(), expected, "{command}");
    }
    let stats = listener.limiter.local_store().stats();
    assert_eq!(stats.keys, 0, "a rejected command is counted nowhere");
}

#[test]
fn out_of_range_numbers_are_rejected_by_name() {
    let refused = [
        (
            "CL.THROTTLE key -1 1 60",
            "max_burst: must be from 0 to 999999999999999, got -1",
        ),
        (
            "CL.THROTTLE key 1 -5 60",
            "count_per_period: must be from 1 to 999999999999999, got -5",
        ),
        (
            "CL.THROTTLE key 1 1 -60",
            "period: must be from 1 to 315576000, got -60",
        ),
        (
            "CL.THROTTLE key 1 1 60 -1",
            "quantity: must be from 0 to 999999999999999, got -1",
        ),
        (
            "CL.THROTTLE key 9223372036854775807 1 60",
            "max_burst: must be from 0 to 999999999999999, got 9223372036854775807",
        ),
        (
            "CL.THROTTLE key 1 1 60 9223372036854775807",
            "quantity: must be from 0 to 999999999999999, got 9223372036854775807",
        ),
        ("CL.THROTTLE  1 1 60", "key: must not be empty"),
    ];
    let listener = TestListener::open();
    let mut client = listener.connect();
    for (command, expected) in refused {
        let expected = format!("-Cell error: Store error: {expected}");
        assert_eq!(client.command(command).to_string(), expected, "{command}");
    }
    let long = client
        .command_of(&[b"CL.THROTTLE", &[b'k'; 2_000], b"1", b"1", b"60"])
        .to_string();
    assert!(
        long.starts_with("-Cell error: Store error: key: 2000 bytes exceeds the maximum of"),
        "{long}"
    );
    // Each number is valid on its own, but together they describe a bucket that takes too long to
    // refill.
    let ages = client
        .command("CL.THROTTLE key 999999999999998 1 315576000")
        .to_string();
    assert!(
        ages.starts_with("-Cell error: Store error: max_burst: "),
        "{ages}"
    );
}

#[test]
fn a_cost_that_never_fits_has_no_retry_time() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    assert_eq!(
        client.command("CL.THROTTLE key 4 1 60 6").to_string(),
        "[1, 5, 5, -1, 0]"
    );
    assert_eq!(
        client.command("CL.THROTTLE key 4 1 60 5").to_string(),
        "[0, 5, 0, -1, 300]"
    );
}

#[test]
fn a_blocked_key_is_limited_until_the_block_ends() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let mut room = Vec::new();
    let key = tidegate_limiter::throttle_key(b"key", &mut room).unwrap();
    listener.limiter.local_store().block(
        key,
        Some(Span::from_secs(90)),
        "abuse",
        listener.limiter.now(),
    );
    assert_eq!(
        client.command("CL.THROTTLE key 4 1 60").to_string(),
        "[1, 5, 0, 90, 90]"
    );
    assert_eq!(
        client.command("THROTTLE key 4 1 60").to_string(),
        "[0, 4, 0, 90, 90]"
    );
    listener
        .limiter
        .local_store()
        .block(key, None, "abuse", listener.limiter.now());
    assert_eq!(
        client.command("CL.THROTTLE key 4 1 60").to_string(),
        "[1, 5, 0, -1, 0]"
    );
}
