//! Tests of the tonic application.

use std::time::Duration;

use tidegate_examples::greeter::{GreetRequest, greeter_client::GreeterClient};
use tokio::{runtime::Handle, task};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;

use crate::{
    app::{App, until_shared},
    support::RedisServer,
};

const TONIC: &str = env!("CARGO_BIN_EXE_tonic-app");

async fn client(app: &App) -> GreeterClient<Channel> {
    let url = format!("http://{}", app.address);
    GreeterClient::connect(url).await.unwrap()
}

async fn greet(client: &mut GreeterClient<Channel>) -> Result<String, Status> {
    let name = "you".to_owned();
    let greeted = client.greet(GreetRequest { name }).await?;
    Ok(greeted.into_inner().greeting)
}

#[tokio::test]
async fn tonic_denies_with_a_grpc_status_and_passes_the_remaining_quota() {
    let app = App::start(TONIC, None);
    let mut client = client(&app).await;
    for left in [2, 1, 0] {
        let greeting = greet(&mut client).await.unwrap();
        assert_eq!(greeting, format!("Hello you, {left} more to come"));
    }
    let denied = greet(&mut client).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    let details = denied.get_error_details();
    let delay = details.retry_info().unwrap().retry_delay.unwrap();
    assert!(delay > Duration::from_secs(30) && delay <= Duration::from_secs(60));
    assert_eq!(
        details.quota_failure().unwrap().violations[0].subject,
        "3/min"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tonic_processes_on_one_redis_share_one_limit_exactly() {
    let redis = RedisServer::start();
    let apps = [(); 2].map(|()| App::start(TONIC, Some(&redis.url())));
    until_shared(&redis, &apps, |app| {
        let asked = async { greet(&mut client(app).await).await.is_ok() };
        task::block_in_place(|| Handle::current().block_on(asked));
    });
    let (mut one, mut other) = (client(&apps[0]).await, client(&apps[1]).await);
    let mut admitted = 0;
    for _ in 0..5 {
        let (one, other) = tokio::join!(greet(&mut one), greet(&mut other));
        admitted += [one, other]
            .iter()
            .filter(|greeted| greeted.is_ok())
            .count();
    }
    assert_eq!(admitted, 3);
}
