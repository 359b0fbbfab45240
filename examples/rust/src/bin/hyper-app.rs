//! A plain hyper server with a built-in limiter. `hyper-app [ADDRESS [REDIS_URL]]`

use std::{convert::Infallible, error::Error, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tidegate::{Clock, Limiter};
use tidegate_core::{Rule, RuleSet, Store};
use tidegate_examples::{in_memory, in_redis, limit};
use tidegate_tower::{RateLimitLayer, identity::Peer};
use tokio::net::TcpListener;
use tower::{Layer, ServiceExt};

/// The limit is three requests a minute per address.
fn rules() -> Result<RuleSet, Box<dyn Error>> {
    let rule = Rule::new("each", vec![limit("3/min")?])?.keyed_by(&["ip"])?;
    Ok(RuleSet::build(vec![rule], Vec::new())?)
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}

async fn serve(listener: TcpListener, store: impl Store + 'static) -> Result<(), Box<dyn Error>> {
    let limiter = Arc::new(Limiter::new(rules()?, store, Clock::real()));
    let limited = RateLimitLayer::new(limiter).layer(tower::service_fn(hello));
    loop {
        let (stream, peer) = listener.accept().await?;
        let limited = limited.clone();
        let service = service_fn(move |mut request| {
            request.extensions_mut().insert(Peer(peer));
            limited.clone().oneshot(request)
        });
        let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        tokio::spawn(served);
    }
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the application prints its address")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments
        .next()
        .unwrap_or_else(|| "127.0.0.1:3002".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    match arguments.next() {
        None => serve(listener, in_memory()).await,
        Some(url) => serve(listener, in_redis(&url)?).await,
    }
}
