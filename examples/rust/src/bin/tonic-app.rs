//! A tonic gRPC service with a built-in limiter. `tonic-app [ADDRESS [REDIS_URL]]`

use std::{error::Error, sync::Arc};

use tidegate::{Clock, Limiter};
use tidegate_core::{Condition, Pattern, Rule, RuleSet, Store, When};
use tidegate_examples::{
    greeter::{
        GreetRequest, GreetResponse,
        greeter_server::{Greeter, GreeterServer},
    },
    in_memory, in_redis, limit,
};
use tidegate_tower::{RateLimitLayer, RateLimitStatus};
use tokio::net::TcpListener;
use tonic::{
    Request, Response, Status,
    transport::server::{Server, TcpConnectInfo, TcpIncoming},
};

struct Friendly;

#[tonic::async_trait]
impl Greeter for Friendly {
    async fn greet(
        &self,
        request: Request<GreetRequest>,
    ) -> Result<Response<GreetResponse>, Status> {
        let left = request
            .extensions()
            .get()
            .and_then(|passed: &RateLimitStatus| passed.remaining);
        let name = &request.get_ref().name;
        let greeting = format!("Hello {name}, {} more to come", left.unwrap_or_default());
        Ok(Response::new(GreetResponse { greeting }))
    }
}

/// The limit is three greetings a minute per address. The path of a gRPC call is
/// `/package.Service/Method`.
fn rules() -> Result<RuleSet, Box<dyn Error>> {
    let greet = Condition::new("path", Pattern::text("/greeter.Greeter/Greet")?)?;
    let rule = Rule::new("greetings", vec![limit("3/min")?])?
        .when(When::all(vec![greet]))
        .keyed_by(&["ip"])?;
    Ok(RuleSet::build(vec![rule], Vec::new())?)
}

async fn serve(listener: TcpListener, store: impl Store + 'static) -> Result<(), Box<dyn Error>> {
    let limiter = Arc::new(Limiter::new(rules()?, store, Clock::real()));
    let limits = RateLimitLayer::new(limiter)
        .peer(|extensions| Some(extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip()));
    Server::builder()
        .layer(limits)
        .add_service(GreeterServer::new(Friendly))
        .serve_with_incoming(TcpIncoming::from(listener))
        .await?;
    Ok(())
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the application prints its address")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments
        .next()
        .unwrap_or_else(|| "127.0.0.1:3001".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    match arguments.next() {
        None => serve(listener, in_memory()).await,
        Some(url) => serve(listener, in_redis(&url)?).await,
    }
}
