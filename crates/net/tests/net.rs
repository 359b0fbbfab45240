//! Tests of workers and listeners over real sockets.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{cell::RefCell, collections::HashMap, io, net::SocketAddr, rc::Rc, time::Duration};

use tidegate_net::{Bounds, Connection, Exempt, LazyTimer, Listener, Server};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const LONG: Duration = Duration::from_secs(30);

fn listen_echo(server: &Server, bounds: Bounds) -> Listener {
    server.listen(any_port(), bounds, echo).unwrap()
}

fn any_port() -> std::net::TcpListener {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap()
}

/// Sends the worker's index, and then echoes bytes until the client disconnects or the shutdown
/// begins.
async fn echo(mut stream: TcpStream, connection: Connection) {
    // The `Rc` deliberately makes the future `!Send`.
    let buffer = Rc::new(RefCell::new(vec![0; 64]));
    let worker = u8::try_from(connection.worker).unwrap();
    stream.write_all(&[worker]).await.unwrap();
    loop {
        let mut bytes = buffer.borrow().clone();
        let read = tokio::select! {
            read = stream.read(&mut bytes) => read.unwrap_or(0),
            () = connection.shutdown.begun() => 0,
        };
        if read == 0 || stream.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

async fn connect(address: SocketAddr) -> (TcpStream, u8) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let worker = stream.read_u8().await.unwrap();
    (stream, worker)
}

#[tokio::test]
async fn connections_are_dealt_evenly_and_served() {
    let server = Server::start(3).unwrap();
    let listener = listen_echo(&server, Bounds::default());
    let mut dealt = HashMap::new();
    let mut streams = Vec::new();
    for _ in 0..12 {
        let (mut stream, worker) = connect(listener.local_addr()).await;
        stream.write_all(b"hello").await.unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"hello");
        *dealt.entry(worker).or_insert(0) += 1;
        streams.push(stream);
    }
    assert_eq!(dealt, HashMap::from([(0, 4), (1, 4), (2, 4)]));
    assert_eq!(
        (listener.open(), listener.accepted(), listener.refused()),
        (12, 12, 0)
    );
}

#[tokio::test]
async fn at_the_bound_the_idlest_connection_makes_room() {
    let server = Server::start(2).unwrap();
    let bounds = Bounds {
        connections: 3,
        ..Bounds::default()
    };
    let listener = listen_echo(&server, bounds);
    let (mut first, _) = connect(listener.local_addr()).await;
    let (mut second, _) = connect(listener.local_addr()).await;
    let (mut third, _) = connect(listener.local_addr()).await;
    // The first connection is active again, and the third is newer, so the second is now the
    // longest-idle connection.
    first.write_all(b"!").await.unwrap();
    assert_eq!(first.read_u8().await.unwrap(), b'!');
    let (mut fourth, _) = connect(listener.local_addr()).await;
    let mut closed = [0; 8];
    assert_eq!(second.read(&mut closed).await.unwrap_or(0), 0);
    for kept in [&mut first, &mut third, &mut fourth] {
        kept.write_all(b"?").await.unwrap();
        assert_eq!(kept.read_u8().await.unwrap(), b'?', "still served");
    }
    let counts = (listener.accepted(), listener.evicted(), listener.refused());
    assert_eq!(counts, (4, 1, 0));
}

#[tokio::test]
async fn a_connection_at_work_is_not_closed_to_make_room() {
    let server = Server::start(1).unwrap();
    let at_work = |stream: TcpStream, connection: Connection| async move {
        let _in_flight = connection.activity.begin();
        echo(stream, connection.clone()).await;
    };
    let bounds = Bounds {
        connections: 1,
        ..Bounds::default()
    };
    let listener = server.listen(any_port(), bounds, at_work).unwrap();
    let (kept, _) = connect(listener.local_addr()).await;
    let mut refused = TcpStream::connect(listener.local_addr()).await.unwrap();
    assert_eq!(refused.read(&mut [0; 8]).await.unwrap_or(0), 0);
    let counts = (listener.open(), listener.refused(), listener.evicted());
    assert_eq!(counts, (1, 1, 0));
    drop(kept);
    while listener.open() > 0 {
        tokio::task::yield_now().await;
    }
    connect(listener.local_addr()).await;
}

#[tokio::test]
async fn a_client_over_its_bound_is_refused_unless_it_is_exempt() {
    let server = Server::start(1).unwrap();
    let bounds = Bounds {
        connections_per_client: 2,
        ..Bounds::default()
    };
    let listener = listen_echo(&server, bounds);
    let kept = [
        connect(listener.local_addr()).await,
        connect(listener.local_addr()).await,
    ];
    let mut refused = TcpStream::connect(listener.local_addr()).await.unwrap();
    assert_eq!(refused.read(&mut [0; 8]).await.unwrap_or(0), 0);
    let counts = (listener.refused_to_client(), listener.evicted());
    assert_eq!(counts, (1, 0));
    drop(kept);
    while listener.open() > 0 {
        tokio::task::yield_now().await;
    }
    connect(listener.local_addr()).await;

    let loopback: Exempt = std::sync::Arc::new(|peer| peer.is_loopback());
    let exempting = server
        .listen_exempting(any_port(), bounds, loopback, echo)
        .unwrap();
    let mut kept = Vec::new();
    for _ in 0..5 {
        kept.push(connect(exempting.local_addr()).await);
    }
    assert_eq!((exempting.open(), exempting.refused_to_client()), (5, 0));
}

#[tokio::test]
async fn a_shutdown_stops_listening_and_waits_for_those_who_finish() {
    let server = Server::start(2).unwrap();
    let listener = listen_echo(&server, Bounds::default());
    let (mut stream, _) = connect(listener.local_addr()).await;
    assert_eq!(server.shutdown(LONG).await, 0, "nobody had to be dropped");
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    let refused = TcpStream::connect(listener.local_addr()).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_shutdown_drops_those_who_do_not_finish_in_time() {
    let server = Server::start(1).unwrap();
    let never = |mut stream: TcpStream, _: Connection| async move {
        stream.write_all(&[0]).await.unwrap();
        std::future::pending::<()>().await;
    };
    let listener = server.listen(any_port(), Bounds::default(), never).unwrap();
    let (mut stream, _) = connect(listener.local_addr()).await;
    assert_eq!(server.shutdown(Duration::from_millis(1)).await, 1);
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_handler_that_panics_takes_only_its_own_connection_with_it() {
    let server = Server::start(1).unwrap();
    let fragile = |mut stream: TcpStream, connection: Connection| async move {
        stream.write_all(&[0]).await.unwrap();
        assert_ne!(stream.read_u8().await.unwrap(), b'!', "asked to panic");
        echo(stream, connection).await;
    };
    let listener = server
        .listen(any_port(), Bounds::default(), fragile)
        .unwrap();
    let (mut bystander, _) = connect(listener.local_addr()).await;
    let (mut victim, _) = connect(listener.local_addr()).await;
    victim.write_all(b"!").await.unwrap();
    assert_eq!(victim.read(&mut [0; 8]).await.unwrap_or(0), 0);

    bystander.write_all(b"?").await.unwrap();
    assert_eq!(bystander.read_u8().await.unwrap(), 0, "still served");
    assert_eq!(listener.open(), 1);
}

#[tokio::test]
async fn dropping_a_server_ends_its_connections() {
    let server = Server::start(2).unwrap();
    let listener = listen_echo(&server, Bounds::default());
    let (mut stream, _) = connect(listener.local_addr()).await;
    drop(server);
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_quiet_connection_is_closed_by_a_handler_with_a_timer() {
    let server = Server::start(1).unwrap();
    let bounds = Bounds {
        idle: Duration::from_millis(1),
        ..Bounds::default()
    };
    let quiet = |stream: TcpStream, connection: Connection| async move {
        let mut timer = LazyTimer::new(connection.bounds.idle);
        std::future::poll_fn(|cx| timer.poll_due(cx)).await;
        drop(stream);
    };
    let listener = server.listen(any_port(), bounds, quiet).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr()).await.unwrap();
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
}
