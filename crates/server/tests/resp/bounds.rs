//! Tests of clients that use too much memory, are too slow, or disconnect.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    time::Duration,
};

use tidegate_core::RuleSet;
use tidegate_net::Bounds;
use tidegate_server::listener::resp;

use crate::listener::{Client, TestListener, encode};

/// A timeout that is short enough for a fast test, but long enough that no other test step times
/// out.
const SHORT: Duration = Duration::from_millis(20);

fn listener(bounds: Bounds) -> TestListener {
    TestListener::with(RuleSet::default(), bounds)
}

#[test]
fn a_million_decisions_in_one_pipeline_are_all_answered() {
    const BATCHES: usize = 1_000;
    const ALLOWED: &[u8] = b"*5\r\n:1\r\n";
    const DENIED: &[u8] = b"*5\r\n:0\r\n";
    let listener = TestListener::open();
    let mut reader = TcpStream::connect(listener.address()).unwrap();
    let mut writer = reader.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let batch = encode(&[b"THROTTLE", b"key", b"1000", b"1", b"1"]).repeat(1_000);
        for _ in 0..BATCHES {
            writer.write_all(&batch).unwrap();
        }
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut answers = Vec::new();
    reader.read_to_end(&mut answers).unwrap();
    sender.join().unwrap();
    let count = |beginning| {
        answers
            .windows(ALLOWED.len())
            .filter(|window| *window == beginning)
            .count()
    };
    assert_eq!((count(ALLOWED), count(DENIED)), (1_000, 999_000));
}

#[test]
fn a_silent_client_is_disconnected() {
    let listener = listener(Bounds {
        idle: SHORT,
        ..resp::default_bounds()
    });
    let mut client = listener.connect();
    assert_eq!(client.command("PING").to_string(), "+PONG");
    assert_eq!(client.rest(), "");
}

#[test]
fn a_client_without_a_command_is_disconnected_before_an_idle_one() {
    let listener = listener(Bounds {
        request: SHORT,
        ..resp::default_bounds()
    });
    assert_eq!(listener.connect().rest(), "");
    let mut client = listener.connect();
    client.send(b"PIN");
    assert_eq!(client.rest(), "", "half a command does not extend the time");
}

#[test]
fn a_client_with_an_incomplete_command_is_disconnected() {
    let listener = listener(Bounds {
        request: SHORT,
        ..resp::default_bounds()
    });
    let mut client = listener.connect();
    client.send(b"PING\r\n*1\r\n$4\r\nPI");
    assert_eq!(client.rest(), "+PONG\r\n");
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let listener = listener(Bounds {
        write: SHORT,
        ..resp::default_bounds()
    });
    let mut stream = TcpStream::connect(listener.address()).unwrap();
    let batch = encode(&[b"ECHO", &[b'x'; 60_000]]);
    // The test writes until the server has closed the connection and the socket buffers are full.
    let closed = std::iter::repeat_with(|| stream.write_all(&batch)).find_map(Result::err);
    assert!(closed.is_some());
    while listener.listener.open() > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn at_the_limit_the_longest_idle_connection_is_closed() {
    let listener = listener(Bounds {
        connections: 2,
        ..resp::default_bounds()
    });
    let mut kept = [listener.connect(), listener.connect()];
    for client in &mut kept {
        assert_eq!(client.command("PING").to_string(), "+PONG");
    }
    let mut newest = listener.connect();
    assert_eq!(newest.command("PING").to_string(), "+PONG");
    let [mut idlest, mut other] = kept;
    assert_eq!(idlest.rest(), "");
    assert_eq!(other.command("PING").to_string(), "+PONG");
    assert_eq!(
        (listener.listener.evicted(), listener.listener.refused()),
        (1, 0)
    );
}

#[tokio::test]
async fn a_shutdown_finishes_received_commands() {
    let listener = TestListener::open();
    let address = listener.address();
    let mut idle = Client::connect(address);
    assert_eq!(idle.command("PING").to_string(), "+PONG");
    let mut asked = Client::connect(address);
    asked.send(&encode(&[b"ECHO", b"x"]).repeat(1_000));
    assert_eq!(asked.value().to_string(), r#""x""#);
    assert_eq!(
        listener.server.shutdown(Duration::from_secs(30)).await,
        0,
        "no connection was dropped"
    );
    assert_eq!(idle.rest(), "");
    assert_eq!(asked.rest().len(), 999 * b"$1\r\nx\r\n".len());
}
