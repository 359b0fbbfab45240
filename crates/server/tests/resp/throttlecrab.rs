//! Compares `THROTTLE` with throttlecrab's documentation, even where throttlecrab itself behaves
//! differently.

use crate::listener::TestListener;

#[test]
fn a_bucket_empties_and_fills() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    assert_eq!(
        client.command("THROTTLE key 3 1 10").to_string(),
        "[1, 3, 2, 10, 0]"
    );
    assert_eq!(
        client.command("THROTTLE key 3 1 10 2").to_string(),
        "[1, 3, 0, 30, 0]"
    );
    assert_eq!(
        client.command("THROTTLE key 3 1 10").to_string(),
        "[0, 3, 0, 30, 10]"
    );
    listener.at_millis(9_999);
    assert_eq!(
        client.command("throttle key 3 1 10").to_string(),
        "[0, 3, 0, 21, 1]"
    );
    listener.at_millis(10_000);
    assert_eq!(
        client.command("throttle key 3 1 10").to_string(),
        "[1, 3, 0, 30, 0]"
    );
    assert_eq!(
        client.command("THROTTLE key 3 1 10 0").to_string(),
        "[1, 3, 0, 30, 0]",
        "a look"
    );
    assert_eq!(
        client.command("THROTTLE key 3 1 10 4").to_string(),
        "[0, 3, 0, 30, -1]",
        "never"
    );
}

#[test]
fn a_burst_of_one_is_enforced() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let allowed = (0..100)
        .filter(|_| client.command("THROTTLE key 1 3 3600").items()[0].to_string() == "1")
        .count();
    assert_eq!(allowed, 1);
}

#[test]
fn input_that_made_throttlecrab_panic_is_answered() {
    let listener = TestListener::open();
    let mut client = listener.connect();
    let answer = client
        .command("THROTTLE x 4294967296 1 1000000000000")
        .to_string();
    assert_eq!(
        answer,
        "-ERR Rate limit check failed: invalid rate limit parameters: \
         period: must be from 1 to 315576000, got 1000000000000"
    );
    assert_eq!(
        client.command("THROTTLE x 1 1 1").to_string(),
        "[1, 1, 0, 1, 0]",
        "the server still answers"
    );
}

#[test]
fn errors_match_the_original() {
    let refused = [
        (
            "THROTTLE",
            "-ERR wrong number of arguments for 'throttle' command",
        ),
        (
            "THROTTLE key 1 2",
            "-ERR wrong number of arguments for 'throttle' command",
        ),
        (
            "THROTTLE key 1 2 3 4 5",
            "-ERR wrong number of arguments for 'throttle' command",
        ),
        ("THROTTLE key x 1 60", "-ERR invalid max_burst"),
        ("THROTTLE key 1 x 60", "-ERR invalid count_per_period"),
        ("THROTTLE key 1 1 x", "-ERR invalid period"),
        ("THROTTLE key 1 1 60 x", "-ERR invalid quantity"),
        ("THROTTLE  1 1 60", "-ERR invalid key: must not be empty"),
        (
            "THROTTLE key 1 1 60 -7",
            "-ERR Rate limit check failed: negative quantity: -7",
        ),
    ];
    let listener = TestListener::open();
    let mut client = listener.connect();
    for (command, expected) in refused {
        assert_eq!(client.command(command).to_string(), expected, "{command}");
    }
    for command in [
        "THROTTLE key 0 1 60",
        "THROTTLE key 1 0 60",
        "THROTTLE key 1 1 0",
        "THROTTLE key -1 1 60",
    ] {
        let answer = client.command(command).to_string();
        let expected = "-ERR Rate limit check failed: invalid rate limit parameters: ";
        assert!(answer.starts_with(expected), "{command}: {answer}");
    }
}
