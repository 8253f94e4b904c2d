// What torch asks of a device's C++ side before anything is computed: one CUDA device, on one stream, that is always
// done. The CPU build of torch has no CUDA library to register these, so they are free to take. They have to be there
// before `import torch` looks for them (gpu_like/device.py loads this file first).
//
// Does not compute: that is Python's part.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10 {
namespace {

const Device THE_DEVICE(DeviceType::CUDA, 0);
const Stream THE_STREAM(Stream::DEFAULT, THE_DEVICE);

struct OneDevice : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return THE_DEVICE; }
  Device exchangeDevice(Device) const override { return THE_DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return THE_STREAM; }
  Stream getDefaultStream(Device) const override { return THE_STREAM; }
  Stream getNewStream(Device, int) const override { return THE_STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return THE_STREAM; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice);

} // namespace
} // namespace c10

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

} // namespace at
