//! What is known about a device: the answer to `show`, and the content of its state file.

use serde::{Deserialize, Serialize};

/// A device. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its daemon's process.
    pub pid: u32,
    /// Where clients find it, in the words of `attach`.
    pub exports: Vec<String>,
    /// Clients connected now.
    pub clients: usize,
    /// The image's path, or `null:SIZE`, `ram:SIZE`.
    pub image: String,
    /// The driver: `loop`, `null`, `ram`.
    pub driver: String,
    /// Size of the device.
    pub size: u64,
    /// Logical block.
    pub sector_size: u32,
    /// Physical block.
    pub physical_sector_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How the backing file is read and written.
    pub direct_io: DirectIoInfo,
    /// What the device can do besides reading and writing.
    pub capabilities: Vec<String>,
    /// What `set` changes, and its fixed companions: name and value, in order.
    pub settings: Vec<(String, String)>,
    /// Facts of the driver: name and value, in order.
    pub driver_facts: Vec<(String, String)>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Direct I/O: asked for and got.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DirectIoInfo {
    /// `on`, `off` or `auto`.
    pub requested: String,
    /// `on` or `off`.
    pub effective: String,
    /// Why it is as it is; empty if it is as asked.
    pub reason: String,
}
