//! Tests of the option `WAIT`, which lets a request wait for a concurrency slot. The clock is
//! manual.

use std::{thread, time::Duration};

use futures_util::FutureExt as _;
use tidegate::RateLimiter as _;
use tidegate_core::{Algorithm, Limit, Rule, RuleSet, SlotWait, Span};
use tidegate_net::Bounds;
use tidegate_server::listener::resp;

use crate::{
    listener::{Client, TestListener, encode},
    value::Value,
};

/// The maximum number of attempts, one per millisecond. All attempts together take longer than any
/// test step.
const ATTEMPTS: usize = 30_000;

fn listener() -> TestListener {
    listener_with(resp::default_bounds())
}

fn listener_with(bounds: Bounds) -> TestListener {
    let lease = Span::from_secs(60);
    let limit = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
    let slot_wait = SlotWait {
        longest: Span::from_secs(30),
        queue: 10,
    };
    let limit = limit.with_slot_wait(slot_wait).unwrap();
    let rule = Rule::new("at-work", vec![limit]).unwrap();
    let rule = rule.keyed_by(&["customer"]).unwrap();
    let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
    TestListener::with(rules, bounds)
}

fn until_waiting(listener: &TestListener, count: usize) {
    for _ in 0..ATTEMPTS {
        if listener.limiter.wait_queues().count() == count {
            return;
        }
        #[expect(clippy::disallowed_methods, reason = "another thread is waited for")]
        thread::sleep(Duration::from_millis(1));
    }
    panic!("{count} requests should wait");
}

fn token_of(reply: &Value) -> String {
    let Value::Array(parts) = reply else {
        panic!("{reply}");
    };
    assert_eq!(parts[0].to_string(), "1", "{reply}");
    parts[6].to_string().trim_matches('"').to_owned()
}

fn reserve(client: &mut Client) -> String {
    token_of(&client.command("TIDEGATE.RESERVE customer acme"))
}

fn settle(client: &mut Client, token: &str) {
    let reply = client.command(&format!("TIDEGATE.SETTLE {token} 1"));
    assert_eq!(reply.to_string(), "[1, 0, 0]");
}

fn send(client: &mut Client, command: &str) {
    let words: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
    client.send(&encode(&words));
}

/// The replies to a pipeline keep their order. Other connections are served during the wait.
#[test]
fn a_waiting_command_delays_only_its_own_connection() {
    let listener = listener();
    let (mut holder, mut client) = (listener.connect(), listener.connect());
    let token = reserve(&mut holder);
    send(&mut client, "TIDEGATE.CHECK WAIT 30000 customer acme");
    send(&mut client, "TIDEGATE.CHECK customer other");
    send(&mut client, "PING");
    until_waiting(&listener, 1);
    assert_eq!(holder.command("PING").to_string(), "+PONG");
    settle(&mut holder, &token);
    let check = client.value().to_string();
    assert!(check.starts_with(r#"[1, "at-work", 1, 0,"#), "{check}");
    let other = client.value().to_string();
    assert!(other.starts_with(r#"[1, "at-work", 1, 0,"#), "{other}");
    assert_eq!(client.value().to_string(), "+PONG");
}

/// The reply to a transaction is sent when all of its commands have been evaluated.
#[test]
fn a_command_of_a_transaction_can_wait() {
    let listener = listener();
    let (mut holder, mut client) = (listener.connect(), listener.connect());
    let token = reserve(&mut holder);
    for command in ["MULTI", "TIDEGATE.CHECK WAIT 30000 customer acme", "PING"] {
        client.command(command);
    }
    send(&mut client, "EXEC");
    until_waiting(&listener, 1);
    settle(&mut holder, &token);
    let replies = client.value().to_string();
    assert!(replies.starts_with(r#"[[1, "at-work", 1, 0,"#), "{replies}");
    assert!(replies.ends_with("+PONG]"), "{replies}");
}

#[test]
fn reservations_wait_in_order() {
    let listener = listener();
    let mut holder = listener.connect();
    let mut token = reserve(&mut holder);
    let mut clients: Vec<Client> = (0..3).map(|_| listener.connect()).collect();
    for (client, count) in clients.iter_mut().zip(1..) {
        send(
            client,
            "TIDEGATE.RESERVE WAIT 30000 TTL 10000 customer acme",
        );
        until_waiting(&listener, count);
    }
    for client in &mut clients {
        settle(&mut holder, &token);
        token = token_of(&client.value());
    }
}

#[test]
fn a_client_that_disconnects_gives_its_turn_on() {
    let listener = listener();
    let mut holder = listener.connect();
    let token = reserve(&mut holder);
    let (mut gone, mut patient) = (listener.connect(), listener.connect());
    send(&mut gone, "TIDEGATE.RESERVE WAIT 30000 customer acme");
    until_waiting(&listener, 1);
    send(&mut patient, "TIDEGATE.RESERVE WAIT 30000 customer acme");
    until_waiting(&listener, 2);
    drop(gone);
    until_waiting(&listener, 1);
    settle(&mut holder, &token);
    token_of(&patient.value());
}

/// A connection that is waiting for a reply is not idle, so it is not closed to make room for
/// another connection.
#[test]
fn a_waiting_connection_is_not_evicted() {
    let listener = listener_with(Bounds {
        connections: 1,
        ..resp::default_bounds()
    });
    let token = reserve(&mut listener.connect());
    let mut patient = listener.connect();
    send(&mut patient, "TIDEGATE.RESERVE WAIT 30000 customer acme");
    until_waiting(&listener, 1);
    assert_eq!(listener.connect().rest(), "", "there is no room");
    assert_eq!(listener.limiter.wait_queues().count(), 1);
    let settled = listener.limiter.settle_reservation(&token, 1);
    settled.now_or_never().unwrap().unwrap();
    token_of(&patient.value());
}

#[test]
fn a_command_that_waits_in_vain_gets_an_ordinary_denial() {
    let listener = listener();
    let mut client = listener.connect();
    let _token = reserve(&mut client);
    let denied = client
        .command("TIDEGATE.CHECK WAIT 20 customer acme")
        .to_string();
    let at_once = client.command("TIDEGATE.CHECK customer acme").to_string();
    assert_eq!(denied, at_once);
    assert!(denied.starts_with(r#"[0, "at-work", 1, 0,"#), "{denied}");
}

#[test]
fn mistakes_name_their_field() {
    let listener = listener();
    let mut client = listener.connect();
    for (command, expected) in [
        (
            "TIDEGATE.CHECK WAIT 60001 customer acme",
            "-ERR wait: 60001 milliseconds exceed the maximum of 60000",
        ),
        (
            "TIDEGATE.RESERVE WAIT soon customer acme",
            "-ERR wait: expected an integer number of milliseconds without a unit, got 'soon'",
        ),
        (
            "TIDEGATE.CHECK PEEK WAIT 10 customer acme",
            "-ERR wait: cannot be combined with PEEK",
        ),
    ] {
        let reply = client.command(command).to_string();
        assert!(reply.starts_with(expected), "{command}: {reply}");
    }
}
