/* A cable between two network namespaces that delays and loses packets, where the kernel has no netem.
 *
 * Usage: link NAMESPACE_A NAMESPACE_B DELAY_US LOST_OF_100000 [MTU]. Needs root. Makes a device `slow0` in each namespace and
 * carries packets between the two until it is killed; the devices end with it. Which packets are lost depends on their number
 * alone. Build: gcc -O2 -o link link.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Packets under way in one direction: more than a delay of some ms holds. */
#define SLOTS 8192
#define LARGEST 9200

struct packet { uint64_t due; int len; unsigned char bytes[LARGEST]; };
struct queue { struct packet *ring; uint64_t in, out; };

static void die(const char *what) { perror(what); exit(1); }

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int device(const char *namespace, int mtu) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int there = open(path, O_RDONLY);
    if (there < 0 || setns(there, CLONE_NEWNET)) die(path);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq wanted = {0};
    wanted.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(wanted.ifr_name, "slow0");
    if (tun < 0 || ioctl(tun, TUNSETIFF, &wanted)) die("/dev/net/tun");
    wanted.ifr_mtu = mtu;
    int any = socket(AF_INET, SOCK_DGRAM, 0);
    if (ioctl(any, SIOCSIFMTU, &wanted)) die("mtu");
    close(any);
    close(there);
    return tun;
}

int main(int n, char **args) {
    if (n < 5) return fprintf(stderr, "usage: link NAMESPACE_A NAMESPACE_B DELAY_US LOST_OF_100000 [MTU]\n"), 2;
    uint64_t delay = strtoull(args[3], 0, 10) * 1000, lost = strtoull(args[4], 0, 10);
    int mtu = n > 5 ? atoi(args[5]) : 1500;
    if (mtu > LARGEST) return fprintf(stderr, "an MTU of %d is more than %d\n", mtu, LARGEST), 2;
    int tuns[2] = {device(args[1], mtu), device(args[2], mtu)};
    struct queue queues[2] = {{calloc(SLOTS, sizeof(struct packet)), 0, 0}, {calloc(SLOTS, sizeof(struct packet)), 0, 0}};
    uint64_t count = 0;
    puts("ready");
    fflush(stdout);
    for (;;) {
        uint64_t next = UINT64_MAX;
        int moved = 0;
        for (int from = 0; from < 2; from++) {
            struct queue *q = &queues[from];
            for (int i = 0; i < 64 && q->in - q->out < SLOTS; i++) {
                struct packet *p = &q->ring[q->in % SLOTS];
                p->len = read(tuns[from], p->bytes, LARGEST);
                if (p->len <= 0) break;
                moved = 1;
                /* Weyl's sequence, mixed: even in the long run, and the same every time. */
                uint64_t mix = ++count * 0x9e3779b97f4a7c15ull;
                mix = (mix ^ mix >> 31) * 0xbf58476d1ce4e5b9ull;
                if ((mix >> 32) % 100000 < lost) continue;
                p->due = now() + delay;
                q->in++;
            }
            uint64_t time = now();
            while (q->out < q->in && q->ring[q->out % SLOTS].due <= time) {
                struct packet *p = &q->ring[q->out % SLOTS];
                /* A device that takes no more loses it, as a full switch does. */
                if (write(tuns[1 - from], p->bytes, p->len) < 0 && errno != EAGAIN && errno != EIO) die("write");
                q->out++;
                moved = 1;
            }
            if (q->out < q->in && q->ring[q->out % SLOTS].due < next) next = q->ring[q->out % SLOTS].due;
        }
        if (moved) continue;
        uint64_t time = now();
        uint64_t ns = next == UINT64_MAX ? 1000000000ull : next > time ? next - time : 0;
        struct timespec wait = {ns / 1000000000ull, ns % 1000000000ull};
        struct pollfd fds[2] = {{tuns[0], POLLIN, 0}, {tuns[1], POLLIN, 0}};
        ppoll(fds, 2, &wait, 0);
    }
}
