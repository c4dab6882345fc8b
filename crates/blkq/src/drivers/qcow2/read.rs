//! Reading: from the image, the images behind it, and compressed clusters.

use std::rc::Rc;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use crate::buffer::IoBuffer;
use crate::error::{IoResult, Status};

use super::allocate::provide;
use super::env::Env;
use super::header::Compression;
use super::io::Memory;
use super::state::Found;

/// Operations of one request in flight together.
const READS_MAX: usize = 64;

/// Reads `bytes` from `position` of the device on into the memory of a request.
///
/// # Errors
/// That of a file, or [`Status::Io`] for tables that break the format.
pub(super) async fn read(env: &Env, position: u64, bytes: u64, memory: &Memory) -> IoResult {
    let (mut done, mut running) = (0, Vec::new());
    let (mut result, mut bounce) = (Ok(()), None);
    while done < bytes && result.is_ok() {
        let (found, run) = find_below(env, 0, position + done, bytes - done).await?;
        match found {
            Found::Zero | Found::Nothing => memory.clear(done, run),
            Found::Data { layer, host } => {
                let op = env.read_op(layer, host).with_memory(memory, done, run);
                running.push(env.io.submit(op.in_epoch(&env.shared.epochs)));
                if running.len() == READS_MAX {
                    for read in running.drain(..) {
                        result = result.and(read.await.map(drop));
                    }
                }
            }
            Found::Compressed { layer, host, bytes, skip } => {
                if bounce.is_none() {
                    // Found anew after the wait: meanwhile another write may have replaced it.
                    bounce = Some(env.reserve(bytes + cluster_bytes(env, layer)).await);
                    continue;
                }
                let content = decompressed(env, layer, host, bytes).await?;
                bounce = None;
                memory.fill(done, &content[skip as usize..][..run as usize]);
            }
        }
        done += run;
    }
    for read in running {
        result = result.and(read.await.map(drop));
    }
    result
}

/// Reads `bytes` from `position` of the device on, as the chain from layer `first` on has them, into memory
/// that is reserved ([`Env::reserve`]).
///
/// # Errors
/// As [`read`].
pub(super) async fn read_own(env: &Env, first: usize, position: u64, bytes: u64) -> Result<IoBuffer, Status> {
    let mut buffer = IoBuffer::zeroed(bytes as usize);
    let mut done = 0;
    while done < bytes {
        let (found, run) = find_below(env, first, position + done, bytes - done).await?;
        let part = done as usize..(done + run) as usize;
        match found {
            Found::Zero | Found::Nothing => {}
            Found::Data { layer, host } => {
                let op = env.read_op(layer, host).with_buffer(IoBuffer::zeroed(run as usize));
                let mut read = env.io.run(op.in_epoch(&env.shared.epochs)).await?;
                match read.buffers.pop() {
                    Some(all) if run == bytes => return Ok(all),
                    Some(read) => buffer[part].copy_from_slice(&read),
                    None => return Err(Status::Io),
                }
            }
            Found::Compressed { layer, host, bytes, skip } => {
                let content = decompressed(env, layer, host, bytes).await?;
                buffer[part].copy_from_slice(&content[skip as usize..][..run as usize]);
            }
        }
        done += run;
    }
    Ok(buffer)
}

async fn find_below(env: &Env, first: usize, position: u64, bytes: u64) -> Result<(Found, u64), Status> {
    loop {
        let found = env.state().find_below(first, position, bytes, None);
        match found {
            Ok(found) => return Ok(found),
            Err(lack) => provide(env, lack).await?,
        }
    }
}

fn cluster_bytes(env: &Env, layer: u8) -> u64 {
    let state = env.state();
    state.layers[usize::from(layer)].tables.as_ref().map_or(0, |tables| tables.header.cluster_bytes())
}

/// The content of a compressed cluster, whose `bytes` compressed ones at most are at `host`.
async fn decompressed(env: &Env, layer: u8, host: u64, bytes: u64) -> Result<Rc<Vec<u8>>, Status> {
    if let Some((place, content)) = &*env.decompressed.borrow()
        && *place == (layer, host)
    {
        return Ok(Rc::clone(content));
    }
    let (align, cluster_bytes) = {
        let state = env.state();
        let layer = &state.layers[usize::from(layer)];
        let tables = layer.tables.as_ref().ok_or(Status::Io)?;
        if tables.header.compression != Compression::Deflate {
            return Err(Status::NotSupported);
        }
        (layer.align, tables.header.cluster_bytes())
    };
    let begin = host - host % align;
    let length = (host + bytes).next_multiple_of(align) - begin;
    let op = env.read_op(layer, begin).with_buffer(IoBuffer::zeroed(length as usize));
    let read = env.io.run(op.in_epoch(&env.shared.epochs)).await?;
    let compressed = &read.buffers[0][(host - begin) as usize..][..bytes as usize];
    let content = Rc::new(inflate(compressed, cluster_bytes as usize)?);
    *env.decompressed.borrow_mut() = Some(((layer, host), Rc::clone(&content)));
    Ok(content)
}

/// Decompresses a raw stream of deflate that has `bytes`.
fn inflate(compressed: &[u8], bytes: usize) -> Result<Vec<u8>, Status> {
    let mut content = vec![0; bytes];
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, length) = decompress(&mut DecompressorOxide::new(), compressed, &mut content, 0, flags);
    match status {
        TINFLStatus::Done | TINFLStatus::HasMoreOutput if length == bytes => Ok(content),
        _ => Err(Status::Io),
    }
}
