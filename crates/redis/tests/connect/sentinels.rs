//! A primary that Sentinels name, and its successor.

use tidegate_core::Decision;
use tidegate_redis::{Settings, Topology};

use crate::{
    asked::{Asked, address, standalone},
    support::{Sentinels, eventually, sentinels::PRIMARY},
};

fn settings(sentinels: &Sentinels, primary: &str) -> Settings {
    let urls = sentinels.urls();
    Settings {
        topology: Topology::Sentinel {
            sentinels: urls.iter().map(|url| address(url)).collect(),
            primary: primary.to_owned(),
        },
        ..standalone(&urls[0])
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed() {
    let mut sentinels = Sentinels::start();
    let unknown = Asked::with(settings(&sentinels, "nobody"));
    assert!(
        unknown
            .trouble()
            .await
            .contains("no Sentinel names a primary `nobody`")
    );

    let asked = Asked::with(settings(&sentinels, PRIMARY));
    assert_eq!(asked.until_decided("k").await, Decision::Admitted);
    sentinels.primary.kill();
    let successor = sentinels.replica.port();
    tokio::task::block_in_place(|| {
        eventually("the Sentinels name the replica", || {
            (sentinels.named()? == successor).then_some(())
        });
    });
    asked.until_decided("k").await;
    asked.until("up again", |health| health.up == 1).await;
    assert!(sentinels.replica.ask(&["DBSIZE"]).as_str() >= ":1");
}
