import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Producers, consumers and tools of RocketMQ in one virtual machine, for the tests of `tests/brokers/rocketmq`.
 *
 * Reads a JSON object a line from standard input and answers each with a line on standard output: `{"result": ...}`, or
 * `{"error": CLASS, "code": N, "text": MESSAGE}`. `do` names the request, `namesrv` the address of the name server. A
 * message is an object of all of its fields; bodies are hexadecimal. What the tools print themselves goes to `result`
 * of `mqadmin`, everything else to standard error.
 */
public class RocketmqSession {
    private static final Gson GSON = new GsonBuilder().disableHtmlEscaping().serializeNulls().create();
    // on a busy machine an answer may take long
    private static final int TIMEOUT_MS = 30_000;
    private final Map<String, DefaultMQAdminExt> admins = new HashMap<>();
    private final Map<String, DefaultMQPullConsumer> pullers = new HashMap<>();
    private final Map<String, TransactionMQProducer> producers = new HashMap<>();
    private final AtomicInteger names = new AtomicInteger();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        RocketmqSession session = new RocketmqSession();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = requests.readLine()) != null; ) {
            JsonObject answer = new JsonObject();
            try {
                answer.add("result", GSON.toJsonTree(session.answer(GSON.fromJson(line, JsonObject.class))));
            } catch (Throwable failure) {
                answer.addProperty("error", failure.getClass().getSimpleName());
                answer.addProperty("code", codeOf(failure));
                answer.addProperty("text", String.valueOf(failure.getMessage()));
            }
            answers.println(GSON.toJson(answer));
        }
        System.exit(0);
    }

    private static Integer codeOf(Throwable failure) {
        try {
            return (Integer) failure.getClass().getMethod("getResponseCode").invoke(failure);
        } catch (ReflectiveOperationException none) {
            return null;
        }
    }

    private Object answer(JsonObject request) throws Exception {
        switch (request.get("do").getAsString()) {
            case "send":
                return send(request);
            case "mqadmin":
                return mqadmin(GSON.fromJson(request.get("arguments"), String[].class));
            case "by_key":
                return described(admin(request).queryMessage(text(request, "topic"), text(request, "key"),
                    request.get("most").getAsInt(), request.get("begin").getAsLong(),
                    request.get("end").getAsLong()).getMessageList());
            case "by_id":
                return described(admin(request).viewMessage(text(request, "topic"), text(request, "id")));
            case "pull":
                return pull(request);
            case "drain":
                return drain(request);
            case "ends":
                return ends(request);
            case "consume":
                return consume(request);
            case "lite_pull":
                return litePull(request);
            default:
                throw new IllegalArgumentException("no such request: " + request);
        }
    }

    // producers

    private TransactionMQProducer producer(JsonObject request) throws Exception {
        String compression = request.has("compression") ? text(request, "compression") : "none";
        String name = text(request, "namesrv") + " " + compression;
        TransactionMQProducer producer = producers.get(name);
        if (producer == null) {
            // each producer reads it when it is made; older clients have no method for it
            System.setProperty("rocketmq.message.compressType", "none".equals(compression) ? "ZLIB" : compression);
            producer = new TransactionMQProducer("producers-" + names.incrementAndGet());
            producer.setNamesrvAddr(text(request, "namesrv"));
            producer.setInstanceName("producer-" + names.get());
            producer.setSendMsgTimeout(TIMEOUT_MS);
            producer.setMqClientApiTimeout(TIMEOUT_MS);
            producer.setRetryTimesWhenSendFailed(0);
            producer.setCompressMsgBodyOverHowmuch("none".equals(compression) ? 4 << 20 : 16);
            producer.setTransactionListener(new TransactionListener() {
                @Override
                public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                    return LocalTransactionState.valueOf((String) state);
                }

                @Override
                public LocalTransactionState checkLocalTransaction(MessageExt message) {
                    return LocalTransactionState.UNKNOW;
                }
            });
            producer.start();
            producers.put(name, producer);
        }
        return producer;
    }

    private List<Object> send(JsonObject request) throws Exception {
        DefaultMQProducer producer = producer(request);
        List<Message> batch = new ArrayList<>();
        List<Object> results = new ArrayList<>();
        for (JsonElement element : request.getAsJsonArray("messages")) {
            JsonObject described = element.getAsJsonObject();
            Message message = message(text(request, "topic"), described);
            if (request.has("batch") && request.get("batch").getAsBoolean()) {
                batch.add(message);
            } else if (described.has("transaction")) {
                results.add(sent(((TransactionMQProducer) producer)
                    .sendMessageInTransaction(message, text(described, "transaction"))));
            } else if (described.has("queue")) {
                int queue = described.get("queue").getAsInt();
                results.add(sent(producer.send(message, (queues, same, chosen) -> queues.get((Integer) chosen), queue)));
            } else {
                results.add(sent(producer.send(message)));
            }
        }
        if (!batch.isEmpty()) {
            results.add(sent(producer.send(batch)));
        }
        return results;
    }

    private static Message message(String topic, JsonObject described) {
        Message message = new Message(topic, HexFormat.of().parseHex(text(described, "body")));
        if (described.has("keys")) {
            message.setKeys(text(described, "keys"));
        }
        if (described.has("tags")) {
            message.setTags(text(described, "tags"));
        }
        if (described.has("delay_level")) {
            message.setDelayTimeLevel(described.get("delay_level").getAsInt());
        }
        if (described.has("delay_ms")) {
            message.setDelayTimeMs(described.get("delay_ms").getAsLong());
        }
        if (described.has("properties")) {
            described.getAsJsonObject("properties").entrySet()
                .forEach(pair -> message.putUserProperty(pair.getKey(), pair.getValue().getAsString()));
        }
        return message;
    }

    private static Map<String, Object> sent(SendResult result) {
        Map<String, Object> described = new TreeMap<>();
        described.put("status", result.getSendStatus().name());
        described.put("id", result.getMsgId());
        described.put("offset_id", result.getOffsetMsgId());
        described.put("queue", result.getMessageQueue().getQueueId());
        described.put("offset", result.getQueueOffset());
        return described;
    }

    // tools

    private DefaultMQAdminExt admin(JsonObject request) throws Exception {
        String namesrv = text(request, "namesrv");
        DefaultMQAdminExt admin = admins.get(namesrv);
        if (admin == null) {
            admin = new DefaultMQAdminExt(TIMEOUT_MS);
            admin.setNamesrvAddr(namesrv);
            admin.setMqClientApiTimeout(TIMEOUT_MS);
            admin.setInstanceName("tools-" + names.incrementAndGet());
            admin.start();
            admins.put(namesrv, admin);
        }
        return admin;
    }

    private static String mqadmin(String[] arguments) throws ReflectiveOperationException {
        // a command keeps the connection of its first call, also to another name server
        Field commands = MQAdminStartup.class.getDeclaredField("SUB_COMMANDS");
        commands.setAccessible(true);
        ((List<?>) commands.get(null)).clear();
        PrintStream before = System.out;
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        System.setOut(new PrintStream(printed, true, StandardCharsets.UTF_8));
        try {
            MQAdminStartup.main0(arguments, null);
        } finally {
            System.setOut(before);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }

    // consumers

    private DefaultMQPullConsumer puller(JsonObject request) throws Exception {
        String namesrv = text(request, "namesrv");
        DefaultMQPullConsumer puller = pullers.get(namesrv);
        if (puller == null) {
            puller = new DefaultMQPullConsumer("pullers");
            puller.setNamesrvAddr(namesrv);
            puller.setMqClientApiTimeout(TIMEOUT_MS);
            puller.setInstanceName("puller-" + names.incrementAndGet());
            puller.start();
            pullers.put(namesrv, puller);
        }
        return puller;
    }

    private static MessageQueue queue(JsonObject request) {
        return new MessageQueue(text(request, "topic"), text(request, "broker"), request.get("queue").getAsInt());
    }

    private Map<String, Object> pull(JsonObject request) throws Exception {
        PullResult result = puller(request).pull(queue(request),
            request.has("tags") ? text(request, "tags") : "*", request.get("offset").getAsLong(),
            request.get("most").getAsInt(), TIMEOUT_MS);
        Map<String, Object> described = new TreeMap<>();
        described.put("status", result.getPullStatus().name());
        described.put("next", result.getNextBeginOffset());
        described.put("begin", result.getMinOffset());
        described.put("end", result.getMaxOffset());
        List<MessageExt> found = result.getMsgFoundList();
        described.put("messages", described(found == null ? List.of() : found));
        return described;
    }

    /** Every message of every queue of a topic's route, by pulls from the least offset on. */
    private List<Object> drain(JsonObject request) throws Exception {
        DefaultMQPullConsumer puller = puller(request);
        List<Object> found = new ArrayList<>();
        List<MessageQueue> queues = new ArrayList<>(puller.fetchSubscribeMessageQueues(text(request, "topic")));
        queues.sort(null);
        for (MessageQueue queue : queues) {
            long offset = puller.minOffset(queue);
            for (long end = puller.maxOffset(queue); offset < end; ) {
                PullResult result = puller.pull(queue, "*", offset, 32, TIMEOUT_MS);
                if (result.getMsgFoundList() != null) {
                    found.addAll(described(result.getMsgFoundList()));
                }
                if (result.getNextBeginOffset() <= offset) {
                    throw new IllegalStateException(queue + " does not go on after " + offset + ": " + result);
                }
                offset = result.getNextBeginOffset();
            }
        }
        return found;
    }

    private Map<String, Object> ends(JsonObject request) throws Exception {
        DefaultMQPullConsumer puller = puller(request);
        Map<String, Object> ends = new TreeMap<>();
        for (MessageQueue queue : puller.fetchSubscribeMessageQueues(text(request, "topic"))) {
            ends.put(String.valueOf(queue.getQueueId()), List.of(puller.minOffset(queue), puller.maxOffset(queue)));
        }
        return ends;
    }

    /** What a push consumer gets, by its own rebalancing or by pops, until it has `most` messages or the time is over. */
    private List<Object> consume(JsonObject request) throws Exception {
        ConcurrentLinkedQueue<MessageExt> got = new ConcurrentLinkedQueue<>();
        CountDownLatch wanted = new CountDownLatch(request.get("most").getAsInt());
        String group = text(request, "group");
        if (request.has("pop") && request.get("pop").getAsBoolean()) {
            admin(request).setMessageRequestMode(text(request, "broker_address"), text(request, "topic"), group,
                MessageRequestMode.POP, 8, TIMEOUT_MS);
        }
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(text(request, "namesrv"));
        consumer.setInstanceName("consumer-" + names.incrementAndGet());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(!(request.has("pop") && request.get("pop").getAsBoolean()));
        consumer.subscribe(text(request, "topic"), "*");
        int failures = request.has("failures") ? request.get("failures").getAsInt() : 0;
        AtomicInteger failed = new AtomicInteger();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            if (failed.getAndIncrement() < failures) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            messages.forEach(message -> {
                got.add(message);
                wanted.countDown();
            });
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        try {
            wanted.await(request.get("wait_ms").getAsLong(), TimeUnit.MILLISECONDS);
        } finally {
            consumer.shutdown();
        }
        return described(new ArrayList<>(got));
    }

    private List<Object> litePull(JsonObject request) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(text(request, "group"));
        consumer.setNamesrvAddr(text(request, "namesrv"));
        consumer.setInstanceName("lite-" + names.incrementAndGet());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        try {
            List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(text(request, "topic")));
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seek(queue, 0);
            }
            return described(consumer.poll(request.get("wait_ms").getAsLong()));
        } finally {
            consumer.shutdown();
        }
    }

    // descriptions

    private static String text(JsonObject request, String name) {
        return request.get(name).getAsString();
    }

    private static List<Object> described(List<MessageExt> messages) {
        List<Object> described = new ArrayList<>();
        messages.forEach(message -> described.add(described(message)));
        return described;
    }

    private static Map<String, Object> described(MessageExt message) {
        Map<String, Object> fields = new TreeMap<>();
        fields.put("id", message.getMsgId());
        fields.put("offset_id", message instanceof MessageClientExt
            ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId());
        fields.put("topic", message.getTopic());
        fields.put("queue", message.getQueueId());
        fields.put("queue_offset", message.getQueueOffset());
        fields.put("log_offset", message.getCommitLogOffset());
        fields.put("size", message.getStoreSize());
        fields.put("flag", message.getFlag());
        fields.put("sys_flag", message.getSysFlag());
        fields.put("born_ms", message.getBornTimestamp());
        fields.put("born_host", String.valueOf(message.getBornHost()));
        fields.put("store_ms", message.getStoreTimestamp());
        fields.put("store_host", String.valueOf(message.getStoreHost()));
        fields.put("reconsumed", message.getReconsumeTimes());
        fields.put("prepared_offset", message.getPreparedTransactionOffset());
        fields.put("crc", message.getBodyCRC());
        fields.put("properties", new TreeMap<>(message.getProperties()));
        fields.put("body", HexFormat.of().formatHex(message.getBody() == null ? new byte[0] : message.getBody()));
        return fields;
    }
}
