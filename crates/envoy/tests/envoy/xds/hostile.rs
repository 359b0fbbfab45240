//! Tests of control planes that send invalid, incomplete or oversized messages, or no messages.

use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};

use prost_types::Any;
use tidegate_config::envoy::{KeepAlive, Ratio, XdsBackoff};
use tidegate_core::Span;
use tidegate_envoy::xds::TYPE_URL;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinSet,
    time::{Instant, pause, sleep},
};
use tonic::Status;

use super::{
    control_plane::{ControlPlane, RunningClient, packed},
    plane::{End, Plane as _, Stream as _, client_of},
    protocol::{limiting, started},
};

/// Waits until the client reports a problem that contains `text`.
async fn wait_for_problem(client: &RunningClient, text: &str) {
    let mut last = None;
    for _ in 0..3_000 {
        last = client.client.problem();
        if last
            .as_deref()
            .is_some_and(|problem| problem.contains(text))
        {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("expected {text:?}, got {last:?}");
}

#[tokio::test]
async fn a_server_that_speaks_another_protocol_is_reported() {
    for reply in [
        &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..],
        b"\0\0\0\x04\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = client_of(&listener.local_addr().unwrap().to_string());
        let started = started();
        let client = RunningClient::start(config, &started.service);
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(reply).await.unwrap();
            let mut preface = [0; 24];
            // The client may close the connection first.
            let _ = stream.read_exact(&mut preface).await;
        }
        wait_for_problem(&client, "no HTTP/2 connection").await;
        wait_for_problem(&client, "whether it expects TLS").await;
        assert!(client.client.is_waiting());
    }
}

#[tokio::test]
async fn nonsense_is_rejected_and_the_last_good_set_stays() {
    let mut plane = ControlPlane::start().await;
    let mut config = plane.config();
    config.max_message = 10_000;
    let started = started();
    let client = RunningClient::start(config, &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let good = || vec![packed(&limiting("shop", 3))];
    stream.send(("1", "a", ""), good()).await.unwrap();
    let half = |bytes: &[u8]| Any {
        type_url: TYPE_URL.to_owned(),
        value: bytes.to_vec(),
    };
    let mut cut = packed(&limiting("shop", 9));
    cut.value.truncate(cut.value.len() - 3);
    for resource in [
        half(b"\xff\xff\xff\xff\xff\xff"),
        half(b"\x12\xff\xff\xff\xff\x0fshop"),
        half(b"\x12\x02\xff\xfe"),
        cut,
        Any::default(),
    ] {
        let mut resources = good();
        resources.push(resource);
        let error = stream.send(("2", "b", "1"), resources).await.unwrap_err();
        assert!(error.starts_with("resources[1]: "), "{error}");
        assert_eq!(started.service.domains(), 1);
    }
    // The length of a NACK is bounded, even if there are many errors.
    let many = vec![packed(&limiting("", 1)); 60];
    let error = stream.send(("3", "c", "1"), many).await.unwrap_err();
    assert!(error.ends_with(" more") && error.len() < 8_192, "{error}");
    // A message that exceeds the maximum size gets no NACK, because it is not read.
    let large = vec![packed(&limiting(&"x".repeat(20_000), 1))];
    stream
        .respond_with(super::control_plane::response("4", "d", large))
        .await;
    let mut stream = plane.accept().await;
    stream.subscription("1").await;
    assert_eq!(client.client.version().as_deref(), Some("1"));
    stream.fail(Status::permission_denied("who are you")).await;
    let mut stream = plane.accept().await;
    stream.subscription("1").await;
    stream.end(End::Broken).await;
    let mut stream = plane.accept().await;
    stream.subscription("1").await;
    stream.send(("5", "e", "1"), good()).await.unwrap();
    assert_eq!(started.service.domains(), 1);
}

/// The control plane does not send anything for an hour of paused time, and then sends rules.
#[tokio::test(start_paused = true)]
async fn a_silent_control_plane_is_reported_and_may_speak_later() {
    let mut plane = ControlPlane::start().await;
    let started = started();
    let client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    assert_eq!(client.client.problem(), None);
    sleep(Duration::from_secs(3_600)).await;
    let problem = client.client.problem().unwrap();
    assert!(
        problem.ends_with("has sent no usable configuration yet"),
        "{problem}"
    );
    assert!(client.client.is_waiting() && !started.service.is_healthy());
    let resources = vec![packed(&limiting("shop", 3))];
    stream.send(("1", "a", ""), resources).await.unwrap();
    assert_eq!(client.client.problem(), None);
    sleep(Duration::from_secs(3_600)).await;
    let resources = vec![packed(&limiting("shop", 4))];
    stream.send(("2", "b", "1"), resources).await.unwrap();
    assert_eq!(
        client.client.problem(),
        None,
        "silence after a configuration is normal"
    );
}

/// Many control planes send a rejected response again after the NACK.
#[tokio::test(start_paused = true)]
async fn repeated_nacks_are_paced() {
    let mut plane = ControlPlane::start().await;
    let mut config = plane.config();
    config.backoff = XdsBackoff {
        initial: Span::from_secs(1),
        max: Span::from_secs(3),
        random_factor: Ratio::ZERO,
        ..XdsBackoff::default()
    };
    let started = started();
    let _client = RunningClient::start(config, &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    for round in 0..2 {
        for seconds in [0, 1, 2, 3, 3] {
            let sent = Instant::now();
            let wrong = vec![packed(&limiting("", 3))];
            let before = ["", "good"][round];
            stream.send(("bad", "n", before), wrong).await.unwrap_err();
            assert_eq!(sent.elapsed().as_secs(), seconds);
        }
        let sent = Instant::now();
        let good = vec![packed(&limiting("shop", 3))];
        stream.send(("good", "n", ""), good).await.unwrap();
        assert_eq!(sent.elapsed().as_secs(), 0, "an ACK does not wait");
    }
}

/// Forwards the first connection to `server` until `silence` is notified. Then reads and writes
/// nothing more, and keeps the connection open.
async fn forward_until(listener: TcpListener, server: SocketAddr, silence: Arc<Notify>) {
    let (mut client, _) = listener.accept().await.unwrap();
    let mut server = TcpStream::connect(server).await.unwrap();
    tokio::select! {
        ended = copy_bidirectional(&mut client, &mut server) => {
            panic!("the connection has ended: {ended:?}");
        }
        () = silence.notified() => pending().await,
    }
}

/// The keep-alive detects a peer that has served a stream and then stops responding.
#[tokio::test]
async fn a_dead_connection_is_noticed() {
    let mut plane = ControlPlane::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = client_of(&listener.local_addr().unwrap().to_string());
    config.keep_alive = KeepAlive {
        interval: Duration::from_secs(10),
        timeout: Duration::from_secs(5),
    };
    let silence = Arc::new(Notify::new());
    let forwarding = forward_until(listener, plane.address, Arc::clone(&silence));
    let mut tasks = JoinSet::new();
    tasks.spawn(forwarding);
    let started = started();
    let client = RunningClient::start(config, &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let good = vec![packed(&limiting("shop", 3))];
    stream.send(("1", "a", ""), good).await.unwrap();
    silence.notify_one();
    pause();
    // The client sends a ping after 10 s, and closes the connection after 5 s without a reply.
    sleep(Duration::from_secs(9)).await;
    assert_eq!(client.client.problem(), None);
    // hyper does not report that the reply is missing.
    wait_for_problem(&client, "stream closed because of a broken pipe").await;
    assert_eq!(started.service.domains(), 1);
}
