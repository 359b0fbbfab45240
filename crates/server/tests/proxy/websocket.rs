//! Tests of WebSockets through the proxy, with tungstenite as the client and the server.

use std::{net::SocketAddr, time::Duration};

use futures_util::{SinkExt, StreamExt};
use tokio::{
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream, accept_async, client_async,
    tungstenite::{
        self, Message,
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use crate::listener::TestListener;

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a server that echoes messages, and closes the connection on request.
async fn echo() -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = socket.accept().await {
            tokio::spawn(async {
                let mut connection = accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = connection.next().await {
                    // tungstenite answers pings and close frames by itself.
                    if matches!(message, Message::Text(_) | Message::Binary(_)) {
                        connection.send(message).await.unwrap();
                    }
                }
            });
        }
    });
    address
}

async fn connect(
    listener: &TestListener,
) -> Result<WebSocketStream<TcpStream>, tungstenite::Error> {
    let stream = TcpStream::connect(listener.listener.local_addr()).await?;
    let connected = client_async("ws://h.example/chat?room=1", stream);
    timeout(TIMEOUT, connected)
        .await
        .unwrap()
        .map(|(connection, _)| connection)
}

/// Sends `message` and returns the reply.
async fn reply_to(connection: &mut WebSocketStream<TcpStream>, message: Message) -> Message {
    connection.send(message).await.unwrap();
    next(connection).await.unwrap()
}

async fn next(connection: &mut WebSocketStream<TcpStream>) -> Option<Message> {
    let next = timeout(TIMEOUT, connection.next()).await.unwrap();
    next.map(Result::unwrap)
}

#[tokio::test]
async fn websocket_messages_and_the_close_handshake_are_forwarded() {
    let listener = TestListener::in_front_of(format!("http://{}", echo().await));
    let mut connection = connect(&listener).await.unwrap();
    let text = Message::text("good morning");
    assert_eq!(reply_to(&mut connection, text.clone()).await, text);
    let large: Vec<u8> = (0..1 << 20_u32)
        .map(|at: u32| at.to_le_bytes()[1])
        .collect();
    let large = Message::binary(large);
    assert_eq!(reply_to(&mut connection, large.clone()).await, large);
    let pong = reply_to(&mut connection, Message::Ping("x".into())).await;
    assert_eq!(pong, Message::Pong("x".into()));
    let close = CloseFrame {
        code: CloseCode::Normal,
        reason: "done".into(),
    };
    connection.close(Some(close.clone())).await.unwrap();
    assert_eq!(
        next(&mut connection).await,
        Some(Message::Close(Some(close)))
    );
    assert_eq!(next(&mut connection).await, None);
}

#[tokio::test]
async fn a_slot_is_held_until_the_websocket_is_closed() {
    let listener = TestListener::open(&format!(
        "rules: [{{name: sockets, limits: [{{algorithm: concurrency, limit: 1}}]}}]
proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'http://{}'}}]}}
",
        echo().await
    ));
    let mut connection = connect(&listener).await.unwrap();
    for _ in 0..3 {
        let text = Message::text("still here");
        assert_eq!(reply_to(&mut connection, text.clone()).await, text);
        let denied = connect(&listener).await.unwrap_err();
        let is_denied =
            matches!(&denied, tungstenite::Error::Http(answer) if answer.status() == 503);
        assert!(is_denied, "{denied:?}");
    }
    connection.close(None).await.unwrap();
    while next(&mut connection).await.is_some() {}
    drop(connection);
    // The proxy may need several polls to notice that the client has disconnected.
    let again = async { while connect(&listener).await.is_err() {} };
    timeout(TIMEOUT, again).await.unwrap();
}
