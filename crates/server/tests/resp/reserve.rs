//! Tests of `TIDEGATE.RESERVE`, `TIDEGATE.SETTLE` and `TIDEGATE.RENEW`.

use tidegate_core::{Limit, Rule, RuleSet};
use tidegate_server::listener::resp;

use crate::{
    listener::{Client, TestListener},
    value::Value,
};

fn listener() -> TestListener {
    let limit: Limit = "10000/min".parse().unwrap();
    let tokens = Rule::new("tokens", vec![limit]).unwrap();
    let tokens = tokens.keyed_by(&["customer"]).unwrap();
    let rules = RuleSet::build(vec![tokens], Vec::new()).unwrap();
    TestListener::with(rules, resp::default_bounds())
}

/// Reserves a cost, and returns the verdict and the token.
fn reserve(client: &mut Client, options: &str) -> (Vec<String>, String) {
    let reply = client.command(&format!("TIDEGATE.RESERVE {options} customer acme"));
    let Value::Array(parts) = reply else {
        panic!("{reply}");
    };
    assert_eq!(parts.len(), 8);
    let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
    let token = parts[6].trim_matches('"').to_owned();
    (parts, token)
}

#[test]
fn a_reservation_is_settled_once() {
    let listener = listener();
    let mut client = listener.connect();
    let (parts, token) = reserve(&mut client, "COST 2000 TTL 30000");
    assert_eq!(
        (&*parts[0], &*parts[2], &*parts[3], &*parts[7]),
        ("1", "10000", "8000", "30000")
    );
    let settle = format!("TIDEGATE.SETTLE {token} 1234");
    assert_eq!(client.command(&settle).to_string(), "[1234, 766, 0]");
    let again = client.command(&settle).to_string();
    assert!(
        again.starts_with("-NOTOUTSTANDING reservation: was already settled, or was made by"),
        "{again}"
    );
    let check = client
        .command("TIDEGATE.CHECK PEEK customer acme")
        .to_string();
    assert!(
        check.starts_with(r#"[1, "tokens", 10000, 8765,"#),
        "{check}"
    );
}

#[test]
fn a_denied_request_has_no_token() {
    let listener = listener();
    let (parts, _) = reserve(&mut listener.connect(), "COST 10001");
    assert_eq!((&*parts[0], &*parts[6], &*parts[7]), ("0", "nil", "-1"));
}

#[test]
fn a_renewed_reservation_has_a_new_token() {
    let listener = listener();
    let mut client = listener.connect();
    let (parts, token) = reserve(&mut client, "TTL 5000");
    assert_eq!(parts[7], "5000");
    listener.at_millis(4_000);
    let Value::Array(renewed) = client.command(&format!("TIDEGATE.RENEW {token} 60000")) else {
        panic!("the reservation was not renewed");
    };
    assert_eq!(renewed[1].to_string(), "60000");
    listener.at_millis(63_000);
    let renewed = renewed[0].to_string();
    let settle = format!("TIDEGATE.SETTLE {} 0", renewed.trim_matches('"'));
    assert_eq!(client.command(&settle).to_string(), "[0, 1, 0]");
}

#[test]
fn mistakes_name_their_field() {
    let listener = listener();
    let mut client = listener.connect();
    for (command, expected) in [
        (
            "TIDEGATE.RESERVE TTL 0 customer acme",
            "-ERR ttl: must be at least 1 millisecond",
        ),
        (
            "TIDEGATE.RESERVE TTL soon customer acme",
            "-ERR ttl: expected an integer number of milliseconds without a unit, got 'soon'",
        ),
        (
            "TIDEGATE.RESERVE PEEK customer acme",
            "-ERR peek: is not an option of a reservation, which always charges; use TIDEGATE.CHECK PEEK",
        ),
        (
            "TIDEGATE.RESERVE COST 3 PEEK customer acme",
            "-ERR peek: is not an option of a reservation",
        ),
        (
            "TIDEGATE.RESERVE customer acme PEEK",
            "-ERR peek: is not an option of a reservation",
        ),
        (
            "TIDEGATE.RESERVE customer",
            "-ERR wrong number of arguments for 'tidegate.reserve' command",
        ),
        (
            "TIDEGATE.SETTLE x y",
            "-ERR cost: must be an integer from 0 to 999999999999999, got 'y'",
        ),
        (
            "TIDEGATE.SETTLE x -1",
            "-ERR cost: must be an integer from 0 to 999999999999999, got '-1'",
        ),
        (
            "TIDEGATE.RESERVE COST 1e3 customer acme",
            "-ERR cost: must be an integer from 1 to 999999999999999, got '1e3'; write 1000",
        ),
        (
            "TIDEGATE.SETTLE x 1",
            "-ERR reservation: is not a token of this server",
        ),
        (
            "TIDEGATE.SETTLE x 1000000000000000",
            "-ERR cost: must be an integer from 0 to 999999999999999, got '1000000000000000'",
        ),
        (
            "TIDEGATE.RENEW x 1",
            "-ERR reservation: is not a token of this server",
        ),
    ] {
        let reply = client.command(command).to_string();
        assert!(reply.starts_with(expected), "{command}: {reply}");
    }
}
