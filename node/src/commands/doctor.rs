//! `doctor`.

use std::path::Path;

use anyhow::Context;
use skein_node::doctor::{Finding, Health, examine};
use skein_node::engine::torch::device;
use skein_node::shell::reader::Reader;
use skein_protocol::net::control::CoordinatorAddress;

/// Free space below which a node soon cannot save a checkpoint.
const DISK_MIN: u64 = 1 << 30;

pub(crate) fn doctor(coordinator: Option<&CoordinatorAddress>, state: Option<&Path>) -> anyhow::Result<()> {
    device::ensure_environment(1).context("cannot set the environment for libtorch")?;
    let cuda = device::load_cuda();
    let mut findings = examine(&cuda, device::DeviceChoice::Best, 1);
    findings.push(disk(state.unwrap_or(Path::new("."))));
    if let Some(address) = coordinator {
        findings.push(reach(address)?);
    }
    let mut bad = 0;
    for finding in &findings {
        let mark = match finding.health {
            Health::Good => "ok  ",
            Health::Poor => "poor",
            Health::Bad => {
                bad += 1;
                "BAD "
            }
        };
        println!("{mark}  {:18} {}", finding.what, finding.found);
        if let Some(mend) = &finding.mend {
            println!("      {:18} -> {mend}", "");
        }
    }
    if bad > 0 { anyhow::bail!("{bad} of {} things do not work: see above", findings.len()) } else { Ok(()) }
}

fn disk(folder: &Path) -> Finding {
    let probe = folder.join(".skein-doctor");
    if let Err(error) = std::fs::write(&probe, b"probe") {
        return Finding::bad("disk", format!("cannot write in {}: {error}", folder.display()), "choose a --state folder that this user may write to");
    }
    let _ = std::fs::remove_file(&probe);
    match free_bytes(folder) {
        Some(free) if free < DISK_MIN => {
            Finding::poor("disk", format!("{} MiB free in {}", free >> 20, folder.display()), "make room: checkpoints take 12 bytes a parameter each")
        }
        Some(free) => Finding::good("disk", format!("{} GiB free in {}", free >> 30, folder.display())),
        None => Finding::good("disk", format!("{} can be written", folder.display())),
    }
}

/// Free bytes of the file system that holds `folder`: the disk with the longest matching mount point.
fn free_bytes(folder: &Path) -> Option<u64> {
    let folder = folder.canonicalize().ok()?;
    let disks = sysinfo::Disks::new_with_refreshed_list().ok()?;
    disks
        .iter()
        .filter(|disk| folder.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().as_os_str().len())
        .map(sysinfo::Disk::available_space)
}

fn reach(address: &CoordinatorAddress) -> anyhow::Result<Finding> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().context("cannot start the runtime")?;
    let finding = match runtime.block_on(Reader::connect(address)) {
        Ok(reader) => Finding::good("coordinator", format!("run `{}` answers at {address}", reader.config().run.name)),
        Err(error) => Finding::bad("coordinator", error.to_string(), "check the address, that the coordinator runs, and that its port is open"),
    };
    runtime.shutdown_background();
    Ok(finding)
}
