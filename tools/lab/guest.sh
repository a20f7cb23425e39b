#!/bin/bash
# In the guest, as its first process: sets up the network, and Soft-RoCE where it is wanted, runs the program, and ends
# the guest. What the host wants is in /mnt/settings (machines.py).
# shellcheck disable=SC1091,SC2153,SC2154 # variables come from there, and from the kernel's command line
exec </dev/null >>"/mnt/output.$guest" 2>&1
end() {
    echo "$1" >"/mnt/status.$guest"
    sync
    echo b >/proc/sysrq-trigger
    sleep 30
}
trap 'end 99' EXIT
. /mnt/settings
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
ln -sf /proc/self/fd /dev/fd
date -s "@$now" >/dev/null
echo "guest$guest" >/proc/sys/kernel/hostname
printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 guest0' '10.77.0.2 guest1' 'fd77::1 guest0-v6' 'fd77::2 guest1-v6' \
    >/etc/hosts
ulimit -l unlimited -n 65536
ip link set lo up
ip link set eth0 up
ip addr add "10.77.0.$((guest + 1))/24" dev eth0
ip addr add "fd77::$((guest + 1))/64" dev eth0 nodad
if [ -n "$rdma" ]; then
    rdma link add rxe0 type rxe netdev eth0
    for _ in {1..50}; do
        grep -qs ACTIVE /sys/class/infiniband/rxe0/ports/1/state && break
        sleep 0.1
    done
fi
export ADDRESS=10.77.0.$((guest + 1)) PEER=10.77.0.$((GUESTS == 2 ? 2 - guest : 1)) GUEST=$guest
if [ "$GUESTS" = 2 ]; then
    for _ in {1..120}; do
        ping -c 1 -W 1 "$PEER" >/dev/null && break
    done
fi
echo "guest$guest: $(uname -rm), up after $(cut -d' ' -f1 /proc/uptime) s"
cd /mnt || exit
rank() {
    RANK=$1 "${command[@]}"
    local status=$?
    touch "/mnt/ended.$1"
    return $status
}
status=0
if [ "$GUESTS" = 2 ] || [ "$RANKS" = 1 ]; then
    rank "$guest" || status=$?
else # both ranks in this guest
    rank 1 &
    rank 0 || status=$?
    wait $! || status=$?
fi
[ $status -lt 128 ] || dmesg | tail -n 40
trap - EXIT
end $status
